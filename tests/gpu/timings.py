"""How long the driver's calls take: `python -m tests.gpu.timings`, one case each.

Memory is made and exported in one process and opened in another, as between the service and its clients: what a process
opens that it has made itself may be a shortcut.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from gms.mapping import Chunk, Reservation, device_memory
from tests.gpu.driver import MIB, Probe
from tests.gpu.report import Calls, Duration, emit, size

T = TypeVar("T")

BATCH = 64
"""Descriptors that are under way at once: no limit of the system is near."""


class _Nothing:
    """A hasher that takes no time."""

    def update(self, data: memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return b""


class Clock:
    """Mean microseconds of calls of the same kind."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def take(self, name: str, call: Callable[..., T], *arguments: object, **named: object) -> T:
        started = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started

    def means(self, count: int) -> dict[str, float]:
        return {name: seconds / count * 1e6 for name, seconds in self._spent.items()}


def chunks(chunk_bytes: int, total_bytes: int) -> None:
    """Every call that one chunk costs, on its way from the service into a client's addresses and back."""
    count = total_bytes // chunk_bytes
    probe, clock = Probe(), Clock()
    with _maker(chunk_bytes, count) as channel:
        address = probe.reserve(count * chunk_bytes)
        handles = [clock.take("import", probe.open, fd) for fd in _received(channel, count)]
        for place, handle in enumerate(handles):
            clock.take("map", probe.map, address + place * chunk_bytes, chunk_bytes, handle)
        clock.take("set access", probe.allow, 0, address, count * chunk_bytes, writable=True)
        for handle in handles:
            clock.take("release", probe.release, handle)
        for place in range(count):
            clock.take("unmap", probe.unmap, address + place * chunk_bytes, chunk_bytes)
        probe.free(address, count * chunk_bytes)
        made = _rest(channel)
    emit(Calls(chunk_bytes, count, made | clock.means(count)))


def attach(chunk_bytes: int, total_bytes: int) -> None:
    """What an engine does as a whole: `gms.mapping` over chunks of the service's default size."""
    count = total_bytes // chunk_bytes
    what = f"{size(count * chunk_bytes)} in chunks of {size(chunk_bytes)}"
    memory = device_memory("cuda:0")
    with _maker(chunk_bytes, count) as channel, Reservation(count * chunk_bytes, memory=memory) as place:
        with _timed(f"backing a range of {what} by one scratch chunk"):
            place.map_scratch(chunk_bytes)
        with _timed(f"unmapping scratch, {what}"):
            place.unmap()
        fds = [os.dup(fd) for fd in _received(channel, count)]
        try:
            with _timed(f"mapping {what}"):
                place.map([Chunk(fd, chunk_bytes) for fd in fds], writable=True)
        finally:
            for fd in fds:
                os.close(fd)
        place.write(0, b"the context is there")
        length = min(place.size_bytes, 64 * MIB)
        place.digest(0, length, _Nothing)  # the host's buffer is there
        with _timed(f"copying {size(length)} to the host"):
            place.digest(0, length, _Nothing)
        with _timed(f"copying {size(length)} to the host and hashing it with blake2b"):
            place.digest(0, length, partial(hashlib.blake2b, digest_size=16))
        with _timed(f"unmapping {what}"):
            place.unmap()
        _rest(channel)


def make(channel: int, chunk_bytes: int, count: int) -> None:
    """The service's side: creates and exports all, sends them when asked, and says how long that took."""
    probe, clock = Probe(), Clock()
    with socket.socket(fileno=channel) as connection:
        handles = [clock.take("create", probe.create, 0, chunk_bytes) for _ in range(count)]
        for first in range(0, count, BATCH):
            fds = [clock.take("export", probe.export, handle) for handle in handles[first : first + BATCH]]
            socket.send_fds(connection, [b"x"], fds)
            for fd in fds:
                os.close(fd)
            if not connection.recv(1):
                return
        for handle in handles:
            probe.release(handle)
        connection.sendall(msgspec.json.encode(clock.means(count)))


@contextmanager
def _maker(chunk_bytes: int, count: int) -> Iterator[socket.socket]:
    """A channel to a process that makes the chunks. It is ended with the block, and must end well."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = map(str, (theirs.fileno(), chunk_bytes, count))
        command = [sys.executable, "-m", "tests.gpu.timings", "make", *arguments]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, cwd=root)
    try:
        with ours:
            yield ours
    finally:
        code = process.wait()
    if code:
        raise RuntimeError(f"the maker of the chunks ended with {code}")


def _received(channel: socket.socket, count: int) -> Iterator[int]:
    """The chunks' descriptors, each closed once the next is taken."""
    for _ in range(0, count, BATCH):
        _, fds, _, _ = socket.recv_fds(channel, 1, BATCH)
        if not fds:
            raise RuntimeError("the maker of the chunks has ended")
        for fd in fds:
            yield fd
            os.close(fd)
        channel.sendall(b"x")


def _rest(channel: socket.socket) -> dict[str, float]:
    """What the maker says last."""
    said = b""
    while data := channel.recv(4096):
        said += data
    return msgspec.json.decode(said, type=dict[str, float])


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    emit(Duration(what, (time.perf_counter() - started) * 1e3))


CASES = {"chunks": chunks, "attach": attach, "make": make}

if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # should a driver keep a descriptor for each handle
    CASES[sys.argv[1]](*map(int, sys.argv[2:]))
