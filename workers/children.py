"""Child processes of the pod's supervisor, and their output.

A child leads a session and process group of its own: a Ctrl-C at the terminal reaches the supervisor only, and
whatever the child started can be killed with it. Its end is noticed through a pidfd, without a thread; the group is
killed while the dead leader is still unreaped, so that its number cannot be somebody else's by then. Children must be
started from the main thread: they ask the kernel to die with the thread that started them (``workers.lifeline``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from gms.legible import on_terminal
from workers.logs import utc

MAX_LINE_BYTES: Final = 16 * 1024
"""A longer line of a child's output is cut into pieces of this size."""
READ_BYTES: Final = 64 * 1024
MAX_DRAIN_BYTES: Final = 1024 * 1024
"""What is still read of a dead child's output: a process that escaped its group could write for ever."""
MAX_QUEUED_LINES: Final = 10_000
CLOSE_SECONDS: Final = 1.0


class LineSplitter:
    """Bytes to lines without their ends, none longer than ``max_bytes``. Knows nothing of files."""

    def __init__(self, *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        done = [piece for line in lines for piece in self._pieces(line.removesuffix(b"\r"))]
        while len(self._rest) > self._max:
            done.append(self._rest[: self._max])
            self._rest = self._rest[self._max :]
        return done

    def flush(self) -> list[bytes]:
        """What came after the last line end."""
        rest, self._rest = self._rest, b""
        return self._pieces(rest) if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        return [line[at : at + self._max] for at in range(0, len(line), self._max)] or [b""]


def label_line(label: str, line: bytes, *, form: Literal["console", "json"], pid: int, now: float) -> bytes:
    """Say whose line it is: in front of it, or as a field of the JSON object that every line is then made to be.

    ``pid`` and ``now`` (wall clock, seconds) are for what a child writes past its logging: a traceback, a warning of a
    C library. It gets the fields that every line of a log has.
    """
    if form == "console":
        return label.encode() + b" " + line
    if line.startswith(b"{") and line.endswith(b"}") and len(line) > len(b"{}"):
        return b'{"process":' + msgspec.json.encode(label) + b"," + line[1:]
    message = line.decode("utf-8", "replace")
    return msgspec.json.encode(
        {"process": label, "time": utc(now), "level": "info", "logger": "output", "message": message, "pid": pid}
    )


def logged_error(line: bytes) -> str | None:
    """The message of a log line of level error, in any form our processes log in; ``None`` for every other line."""
    if line.startswith(b"{"):
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        return str(record.get("message")) if record.get("level") == "error" else None
    _, found, message = line.partition(b" ERROR ")
    return message.decode("utf-8", "replace").strip() if found else None


class LogSink:
    """Writes lines to a file descriptor from a thread, and drops them rather than make anybody wait.

    A terminal that was stopped, or a pager that nobody scrolls, takes no more output. That must not block the
    supervisor, nor, through full pipes, the engines.
    """

    def __init__(self, fd: int, *, max_lines: int = MAX_QUEUED_LINES) -> None:
        """``fd`` stays the caller's; ``max_lines`` wait at most."""
        self._fd = fd
        self._is_terminal = os.isatty(fd)
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log-sink", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Have a line written, its end added; on a terminal, without what that would obey."""
        if self._is_terminal:
            line = on_terminal(line.decode("utf-8", "backslashreplace")).encode()
        self.offer(line + b"\n")

    def offer(self, data: bytes) -> None:
        """Have something written as it is, whole or not at all."""
        try:
            if self._dropped:
                self._lines.put_nowait(b"(%d lines could not be written, or nobody read them)\n" % self._dropped)
                self._dropped = 0
            self._lines.put_nowait(data)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued, for at most a second."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    @contextlib.contextmanager
    def takes_logging(self) -> Iterator[None]:
        """While inside, what this process logs to a stream goes the same way."""
        stream = _SinkStream(self)
        handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        replaced = [(handler, handler.setStream(stream)) for handler in handlers]
        try:
            yield
        finally:
            for handler, old in replaced:
                if old is not None:
                    handler.setStream(old)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EBADF):
                    return  # the reader is gone; the queue fills up, and lines are dropped
                self._dropped += 1  # a full disk, say: it may have room again for the next line


class _SinkStream(io.TextIOBase):
    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def write(self, text: str) -> int:
        self._sink.put(text.removesuffix("\n").encode("utf-8", "backslashreplace"))
        return len(text)


class Child:
    """One running process. ``on_line`` gets its output, ``on_exit`` is called once when it ended: then ``reap`` it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: Callable[[bytes], None],
        on_exit: Callable[[], None],
    ) -> None:
        """Start it.

        Raises:
            OSError: there is no such program, or the system has no room for another process.
        """
        self._loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._on_exit = on_exit
        self._lines = LineSplitter()
        self.complaint = ""
        """What to quote when it ends: the last error it logged, or else the last thing it said."""
        self._logged_error = False
        self._output, childs_end = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self._output, False)  # this end only: the child's writes may wait
            self._process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=childs_end,
                stderr=childs_end,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(childs_end)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            os.close(self._output)
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM to the process. It may have ended already."""
        self._send(signal.SIGTERM)

    def resume(self) -> None:
        """SIGCONT to the process: without it one that is stopped hears of nothing."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to the whole process group. Harmless once it was reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self, *, timeout_seconds: float = 0.0) -> int:
        """Kill what is left of the group, read the rest of the output, and return the exit code.

        ``timeout_seconds`` is for a child that was killed and has not been seen to end: the call blocks for it.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        self.kill()
        code = self._process.wait(timeout_seconds or None)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._drain()
        return code

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_exit()

    def _read(self) -> int:
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.remove_reader(self._output)
        self._say(self._lines.feed(data))
        return len(data)

    def _drain(self) -> None:
        read = 0
        while read < MAX_DRAIN_BYTES and (count := self._read()):
            read += count
        self._say(self._lines.flush())
        self._loop.remove_reader(self._output)
        os.close(self._output)

    def _say(self, lines: list[bytes]) -> None:
        for line in lines:
            error = logged_error(line)
            if error is not None or (line.strip() and not self._logged_error):
                self.complaint = error or line.decode("utf-8", "replace").strip()
                self._logged_error = self._logged_error or error is not None
            self._on_line(line)
