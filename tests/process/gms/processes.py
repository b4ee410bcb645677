"""Processes of these tests: real ones, whose lines are read with a deadline, and which are always reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from tests.process.gms.forkserver import Forked, ForkServer

MS = 0.001
DEADLINE = 10_000 * MS


def until(condition: Callable[[], object], what: str, *, seconds: float | None = None) -> None:
    """Waits for something that another process does and that nothing announces, up to DEADLINE or so long."""
    deadline = time.monotonic() + (DEADLINE if seconds is None else seconds)
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        select.select([], [], [], 2 * MS)


class Process:
    """A child whose lines are read with a deadline. Always reaped."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        stream: str = "stdout",
        *,
        server: ForkServer | None = None,
    ) -> None:
        """Of Python, with `arguments`; or forked by a server, which must have been made for what is to be run."""
        self.process: subprocess.Popen[bytes] | Forked
        if server is not None:
            self.process = _forked(server, arguments, environment, stream)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if stream == "stdout" else subprocess.DEVNULL,
                stderr=subprocess.PIPE if stream == "stderr" else None,
                env={**os.environ, **(environment or {})},
            )
        pipe = self.process.stdout if stream == "stdout" else self.process.stderr
        assert pipe is not None
        self._pipe = pipe
        self._buffer = b""
        self.pid = self.process.pid

    def line(self) -> str:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], DEADLINE)
            assert ready, "the process said nothing"
            data = os.read(self._pipe.fileno(), 65536)
            assert data, f"the process ended: {self._buffer!r}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def said(self) -> bool:
        """Whether there is something to be read."""
        return bool(self._buffer or select.select([self._pipe], [], [], 0)[0])

    def expect(self, text: str) -> str:
        """Reads on to a line with the text."""
        while text not in (line := self.line()):
            pass
        return line

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        return self.process.wait(DEADLINE)

    def rest(self) -> str:
        """What it still says until its end."""
        data = self._buffer
        while chunk := os.read(self._pipe.fileno(), 65536):
            data += chunk
        return data.decode()

    def fds(self) -> list[str]:
        return descriptors_of(self.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(self.process, Forked):
            self.process.close()


def _forked(server: ForkServer, arguments: list[str], environment: dict[str, str] | None, stream: str) -> Forked:
    """With the standard descriptors that a process started anew has here."""
    dash, *program = arguments
    assert dash == "-m", arguments
    with ExitStack() as stack:
        pipes = {name: os.pipe() for name in ("stdin", stream)}
        ours = {"stdin": pipes["stdin"][1], stream: pipes[stream][0]}
        theirs = {"stdin": pipes["stdin"][0], stream: pipes[stream][1]}
        for fd in theirs.values():
            stack.callback(os.close, fd)
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        stack.callback(os.close, nothing)
        files = {name: open(fd, "wb" if name == "stdin" else "rb") for name, fd in ours.items()}  # noqa: SIM115
        forked = server.fork(
            program,
            {**os.environ, **(environment or {})},
            stdin=theirs["stdin"],
            stdout=theirs.get("stdout", nothing),
            stderr=theirs.get("stderr", 2),
        )
    for name, file in files.items():
        setattr(forked, name, file)
    return forked


def descriptors_of(pid: int | str) -> list[str]:
    """What a process's descriptors refer to; one that is closed while they are read is left out."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry.path))
    return sorted(found)
