"""A MemoryBackend over small files in memory, whose every call a test can hold up or make fail."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gms.backends.base import ForeignPagesError, Hash, Identity, OutOfMemoryError

DEADLINE: Final = 10.0
CHUNK: Final = 64
SLICE: Final = 32


class Plain:
    """Its digest shows what it is of."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = data

    def update(self, data: memoryview) -> None:
        self._data += data

    def digest(self) -> bytes:
        return self._data[:8].ljust(8, b"\0") + len(self._data).to_bytes(4, "little")


@dataclass(eq=False)
class Chunk:
    tag: str
    fd: int
    size_bytes: int
    populated: list[int] = field(default_factory=list)
    frozen: bool = False

    def write(self, data: bytes, offset: int = 0) -> None:
        """What a client would do through its mapping."""
        os.pwrite(self.fd, data, offset)


class Held:
    """A call that stands still on the memory thread until the test lets it go."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, DEADLINE), "the call never came"

    def release(self) -> None:
        self._released.set()

    def __call__(self) -> None:
        self._reached.set()
        assert self._released.wait(DEADLINE), "the test never let the call go"


@dataclass
class _Rule:
    call: str
    left: int
    act: Callable[[], None]


class FileBackend:
    """`calls` are all calls so far, by name and tag; `room` is what the machine has, None for no end of it. Everything
    must run on one thread, `share` alone on the loop's."""

    device_id: Final = "cpu:0"
    granularity: Final = 16
    chunk_bytes: Final = CHUNK
    slice_bytes: Final = SLICE
    descriptors_per_chunk: Final = 1

    def __init__(self, *, readable: bool = True, room: int | None = None) -> None:
        self.readable: Final = readable
        self.room = room
        self.alive: list[Chunk] = []
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self._rules: list[_Rule] = []

    def hold(self, call: str, nth: int = 1) -> Held:
        """The nth such call from now on stands still."""
        held = Held()
        self._rules.append(_Rule(call, nth, held))
        return held

    def fail(self, call: str, error: Exception, nth: int = 1) -> None:
        """The nth such call from now on raises."""

        def act() -> None:
            raise error

        self._rules.append(_Rule(call, nth, act))

    def release(self) -> None:
        """Lets go what is still held up."""
        for rule in self._rules:
            if isinstance(rule.act, Held):
                rule.act.release()

    def count(self, call: str) -> int:
        return sum(made.split()[0] == call for made in self.calls)

    def create(self, tag: str, size_bytes: int) -> Chunk:
        self._enter("create", tag)
        fd = os.memfd_create(tag, os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        self.alive.append(Chunk(tag, fd, size_bytes))
        return self.alive[-1]

    def populate(self, pages: Chunk, offset: int, length: int) -> None:
        self._enter("populate", pages.tag)
        assert pages in self.alive
        if self.room is not None:
            if length > self.room:
                raise OutOfMemoryError(f"the machine has {self.room} bytes left")
            self.room -= length
        pages.populated.append(length)

    def freeze(self, pages: Chunk) -> None:
        self._enter("freeze", pages.tag)
        assert pages in self.alive
        pages.frozen = True

    def digest(self, pages: Chunk, offset: int, length: int, algorithm: Hash) -> bytes:
        assert self.readable
        self._enter("digest", pages.tag)
        assert pages in self.alive
        hasher = algorithm()
        hasher.update(memoryview(os.pread(pages.fd, length, offset)))
        return hasher.digest()

    def identify(self, pages: Chunk) -> Identity:
        self._enter("identify", pages.tag)
        return self._identity(pages.fd, pages.frozen)

    def frozen(self, identity: Identity) -> Identity:
        return msgspec.structs.replace(identity, seals=1)

    def adopt(self, fd: int, identity: Identity) -> Chunk:
        self._enter("adopt", "")
        frozen = bool(identity.seals)
        if self._identity(fd, frozen) != identity:
            raise ForeignPagesError("it is another file")
        self.alive.append(Chunk("adopted", os.dup(fd), identity.size_bytes, [identity.size_bytes], frozen))
        return self.alive[-1]

    def share(self, pages: Chunk, *, writable: bool) -> int:
        self.calls.append(f"share {pages.tag}")
        assert sum(pages.populated) == pages.size_bytes
        return os.dup(pages.fd)

    def destroy(self, pages: Chunk) -> None:
        self._enter("destroy", pages.tag)
        self.alive.remove(pages)
        os.close(pages.fd)
        if self.room is not None:
            self.room += sum(pages.populated)

    def _enter(self, call: str, tag: str) -> None:
        self.calls.append(f"{call} {tag}".strip())
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "the memory thread is not alone"
        assert threading.current_thread() is not threading.main_thread()
        for rule in list(self._rules):
            if rule.call == call:
                rule.left -= 1
                if rule.left == 0:
                    rule.act()

    def _identity(self, fd: int, frozen: bool) -> Identity:
        found = os.fstat(fd)
        return Identity(size_bytes=found.st_size, device=found.st_dev, inode=found.st_ino, seals=int(frozen))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def turns(count: int = 5) -> None:
    """Lets the loop run on: what does not wait for another thread has happened then."""
    for _ in range(count):
        await asyncio.sleep(0)
