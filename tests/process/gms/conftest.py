"""A real service in a process of its own, and clients in theirs, so that kill means kill."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gms.client import GmsClient

MS = 0.001
DEADLINE = 10_000 * MS
PRELUDE = """
import os, signal, sys, threading
from gms.client import *
from gms.mapping import *
SOCKET = sys.argv[1]
def connect(engine="a", **more):
    return GmsClient.connect(SOCKET, engine=engine, instance="test", **more)
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write a line: forked children say things too
def hear():
    return sys.stdin.readline().strip()
def mapped(allocation, writable=True):
    reservation = Reservation(allocation.size_bytes)
    reservation.map(allocation.chunks, writable=writable)
    return reservation
"""


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for something that another process does and that nothing announces."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        select.select([], [], [], 2 * MS)


class Process:
    """A child whose lines are read with a deadline. Always reaped."""

    def __init__(self, arguments: list[str], environment: dict[str, str] | None = None, stream: str = "stdout") -> None:
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
        """What its descriptors refer to; one that is closed while they are read is left out."""
        found = []
        for entry in os.scandir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(entry.path))
        return sorted(found)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gms-") as path:
        yield Path(path)


@pytest.fixture
def socket_path(folder: Path) -> Path:
    return folder / "gms.sock"


Spawn = Callable[..., Process]


@pytest.fixture
def spawn(folder: Path) -> Iterator[Spawn]:
    """What is started here is gone before its folder is."""
    processes: list[Process] = []

    def start(arguments: list[str], environment: dict[str, str] | None = None, stream: str = "stdout") -> Process:
        processes.append(Process(arguments, environment, stream))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def serve(spawn: Spawn, socket_path: Path) -> Spawn:
    """Starts a service that listens before it is returned."""

    def start(*flags: str, environment: dict[str, str] | None = None) -> Process:
        process = spawn(["-m", "gms", "--socket", str(socket_path), *flags], environment, "stderr")
        process.expect("listens on")
        return process

    return start


@pytest.fixture
def service(serve: Spawn) -> Process:
    return serve()


@pytest.fixture
def actor(spawn: Spawn, socket_path: Path) -> Spawn:
    """A client in a process of its own, running the code given after PRELUDE."""

    def start(code: str) -> Process:
        return spawn(["-c", PRELUDE + textwrap.dedent(code), str(socket_path)])

    return start


@pytest.fixture
def client(service: Process, socket_path: Path) -> Iterator[GmsClient]:
    with GmsClient.connect(socket_path, engine="test", instance="test") as connection:
        yield connection


@pytest.fixture(autouse=True)
def no_descriptor_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    if "client" not in request.fixturenames and "spawn" not in request.fixturenames:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def eventually() -> Callable[[Callable[[], object], str], None]:
    return until
