"""The processes that ``hotspare up`` starts: each in a session of its own, so that a Ctrl-C in the terminal reaches
only ``up``, and each with a log file that ``up`` reads along.

A file, not a pipe: whatever ``up`` does or suffers, a child never waits for somebody to take its output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from workers.process_state import is_stopped

READ_BYTES: Final = 64 * 1024
MAX_LINE_BYTES: Final = 16 * 1024


class Child:
    """One child process. Start it from the main thread: it asks to die with the thread that forked it."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        """Start it, with an empty log.

        Raises:
            OSError: the log cannot be written, or there is no room for a process.
        """
        self.name = name
        self.log = log
        writing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._pidfd = os.pidfd_open(self._process.pid)  # not reaped yet, so the number is still its own
        self._reading = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""
        self._copy = -1
        """Of a log that was removed: where a new one is."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. It may have ended already."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def stopped(self) -> bool:
        """Whether it does not run because of SIGSTOP or the like."""
        return self.running and is_stopped(self.pid)

    def terminate(self) -> None:
        """SIGTERM, and SIGCONT, without which one that is stopped would not hear of it."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    async def ended(self) -> int:
        """Wait for the end; exit code, or minus the signal's number. For one waiter at a time."""
        import asyncio  # 80 ms, which the start of the children need not wait for

        if self.running:
            gone = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._pidfd, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(self._pidfd)
        return self._process.wait()

    def new_lines(self) -> list[str]:
        """What it has logged since the last call, whole lines only; all that is left once it has ended."""
        over = not self.running
        while data := os.read(self._reading, READ_BYTES):
            self._rest += data
            self._keep(data)
        *lines, self._rest = self._rest.split(b"\n")
        if (over or len(self._rest) > MAX_LINE_BYTES) and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def restore_log(self) -> None:
        """Somebody removed the log: have another one there, with what it held. The process writes on into the old one,
        so that each further line gets into the new one when it is read.

        Raises:
            OSError: it cannot be written.
        """
        if self.log.exists():
            return
        if self._copy >= 0:
            os.close(self._copy)
            self._copy = -1
        self._copy = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        read, at = os.lseek(self._reading, 0, os.SEEK_CUR), 0
        while data := os.pread(self._reading, min(READ_BYTES, read - at), at):
            os.write(self._copy, data)
            at += len(data)

    def _keep(self, data: bytes) -> None:
        if self._copy >= 0:
            with contextlib.suppress(OSError):
                os.write(self._copy, data)

    def reap(self) -> int:
        """Wait for the end, without a loop: for a child that was killed."""
        return self._process.wait()

    def close(self) -> None:
        """Give the descriptors back; for a child that has ended."""
        os.close(self._pidfd)
        os.close(self._reading)
        if self._copy >= 0:
            os.close(self._copy)
