"""A memory service over files in memory, in one life after another, and engines that outlive it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gms import integrity, protocol
from gms.allocations import MAX_CHUNKS
from gms.backends.base import DeviceError, Hasher
from gms.clients import Client
from gms.journal import Journal
from gms.manifest import Manifest, Slot
from gms.protocol import Digests, LeaseMode, Part
from gms.service import MemoryService
from tests.unit.gms.memory_backend import CHUNK, Chunk, FileBackend, turns

RW, RO, ANY = LeaseMode.RW, LeaseMode.RO, LeaseMode.RW_OR_RO
WEIGHTS: Final = "weights/x"
_NUMBERS: Final[Iterator[int]] = itertools.count(1)


def hasher() -> Hasher:
    return hashlib.blake2b(digest_size=8)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def manifest(*offsets: int, size: int, tag: str = "w") -> bytes:
    """A tensor `tOFFSET` of 16 bytes at each of these places."""
    slots = {
        f"t{offset}": Slot(offset=offset, size_bytes=16, shape=(4,), stride=(1,), storage_offset=0, dtype="float32")
        for offset in offsets
    }
    return Manifest(tag=tag, size_bytes=size, parameters=slots, buffers={}, aliases={}).encode()


class Seen:
    """An Observer that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def attached(self, pool: str, mode: str, seconds: float) -> None:
        self.heard.append(("attached", pool, str(mode)))

    def refused(self, code: str) -> None:
        self.heard.append(("refused", code))

    def allocated(self, pool: str, size_bytes: int, seconds: float) -> None:
        self.heard.append(("allocated", pool, size_bytes))

    def hashed(self, size_bytes: int, seconds: float) -> None:
        self.heard.append(("hashed", size_bytes))

    def handed_back(self, pool: str, outcome: str, seconds: float) -> None:
        self.heard.append(("handed_back", pool, outcome))


class Life:
    """One life of a service with a journal in `folder`, or without one. `end` as after SIGTERM, `kill` as by SIGKILL:
    the kernel takes the memory that nobody has mapped, and nothing is tidied up."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        readable: bool = True,
        limit: int | None = None,
        chunks: int = MAX_CHUNKS,
        adopt_seconds: float = 30.0,
        algorithm_name: str = "blake2b",
    ) -> None:
        self.backend = FileBackend(readable=readable)
        self.seen = Seen()
        self.failures: list[DeviceError] = []
        self.service: MemoryService[Chunk] = MemoryService(
            self.backend,
            device="cpu:0",
            algorithm=hasher,
            algorithm_name=algorithm_name,
            journal=None if folder is None else Journal(folder),
            limit_bytes=limit,
            max_chunks=chunks,
            adopt_seconds=adopt_seconds,
            observer=self.seen,
            fail=self.failures.append,
        )
        self._over = False

    def end(self) -> None:
        if not self._over:
            self._over = True
            self.backend.release()
            self.service.close()
            assert self.backend.alive == []

    def kill(self) -> None:
        self.service._ledger.close = lambda: None  # type: ignore[method-assign]
        self.end()

    def state(self, pool: str) -> str:
        found = [status.state for status in self.service.status().pools if status.name == pool]
        return found[0] if found else "EMPTY"

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.service.events.after(0, 0.0)]

    async def said(self, kind: str) -> list[str]:
        return [event.detail for event in await self.service.events.after(0, 0.0) if event.kind == kind]

    async def until(self, pool: str, state: str) -> None:
        """Waits for the pool's state, told by the service's events."""
        seen = 0
        async with asyncio.timeout(10):
            while self.state(pool) != state:
                seen = (await self.service.events.after(seen, 10.0))[-1].seq
                await turns()

    async def settle(self) -> None:
        """Until the memory thread has done all that was asked of it."""
        await asyncio.wrap_future(self.service._store._thread.submit(lambda: None))
        await turns()


class Engine:
    """A process with a connection to a service, that keeps what it was given until `close`."""

    def __init__(self, life: Life, name: str, *, ranks: int = 0) -> None:
        self.name = name
        self.processes = frozenset(("pidfs", next(_NUMBERS)) for _ in range(1 + ranks))
        self.locks: list[int] = []
        self.fds: dict[tuple[str, str], list[int]] = {}
        self.leases: dict[str, tuple[protocol.Granted, int]] = {}
        self.connect(life)

    def connect(self, life: Life) -> None:
        """To another life, or again."""
        self.life = life
        self.client = Client(next(_NUMBERS), "engine", self.name, "i", None, self.processes, len(self.processes))
        life.service.join(self.client)

    def hang_up(self) -> bool:
        """The connection breaks, the process lives on."""
        return self.life.service.leave(self.client.id, proof=False)

    def die(self) -> None:
        """The kernel closes its files, then its connection ends; its pidfd is readable."""
        self.close()
        assert not self.life.service.leave(self.client.id, proof=True)

    def close(self) -> None:
        for fd in [*self.locks, *(fd for fds in self.fds.values() for fd in fds)]:
            os.close(fd)
        self.locks.clear()
        self.fds.clear()

    async def attach(
        self, pool: str, mode: LeaseMode = RW, *, epoch: int = 0, seconds: float = 10.0, verify: bool = False
    ) -> protocol.Granted:
        message = protocol.Attach(pool=pool, mode=mode, epoch=epoch, timeout_seconds=seconds, verify=verify)
        granted, fds = await self.life.service.attach(self.client, message)
        return self._leased(pool, granted, fds, epoch)

    async def allocate(self, pool: str, tag: str = "w", size: int = CHUNK, seconds: float = 0.0) -> protocol.Pages:
        message = protocol.Allocate(pool=pool, tag=tag, size_bytes=size, timeout_seconds=seconds)
        pages, fds = await self.life.service.allocate(self.client, message)
        self._kept(pool, tag, fds)
        return pages

    def export(self, pool: str, tag: str = "w", first: int = 0) -> protocol.Pages:
        message = protocol.Export(pool=pool, tag=tag, first=first)
        pages, fds = self.life.service.export(self.client, message)
        self._kept(pool, tag, fds) if first == 0 else self.fds[pool, tag].extend(fds)
        return pages

    async def commit(
        self, pool: str = WEIGHTS, manifest: bytes = b"", digests: Digests | None = None
    ) -> protocol.Granted:
        message = protocol.Commit(pool=pool, manifest=manifest, digests=digests or {})
        granted = await self.life.service.commit(self.client, message)
        self.leases[pool] = granted, 0
        return granted

    def release(self, pool: str, *, quiesced: bool = False) -> None:
        self.life.service.release(self.client, protocol.Release(pool=pool, quiesced=quiesced))

    async def load(self, *offsets: int, size: int = 2 * CHUNK) -> protocol.Granted:
        """Writes weights, each piece other than the next, and commits them."""
        await self.attach(WEIGHTS)
        await self.allocate(WEIGHTS, size=size)
        self.write(WEIGHTS, bytes(index % 251 for index in range(size)))
        described = manifest(*offsets, size=size)
        word = {} if self.life.backend.readable else self.digests(WEIGHTS, described)
        return await self.commit(WEIGHTS, described, word)

    async def load_again(self, *offsets: int, size: int = 2 * CHUNK) -> protocol.Granted:
        self.release(WEIGHTS)
        return await self.load(*offsets, size=size)

    async def read(self) -> protocol.Granted:
        """Attaches to weights as a reader."""
        granted = await self.attach(WEIGHTS, RO)
        self.export(WEIGHTS)
        return granted

    def write(self, pool: str, data: bytes, tag: str = "w", offset: int = 0) -> None:
        """Through its descriptors, as if it had them mapped: no seal is in the way here."""
        for index, fd in enumerate(self.fds[pool, tag]):
            start = index * CHUNK - offset
            if part := data[max(start, 0) : max(start + CHUNK, 0)]:
                os.pwrite(fd, part, max(-start, 0))

    def digests(self, pool: str, described: bytes, tag: str = "w") -> Digests:
        """What it would hash of its mapping."""
        fds = self.fds[pool, tag]
        size = sum(os.fstat(fd).st_size for fd in fds)
        return {
            tag: [
                digest(os.pread(fds[piece.chunk], piece.length, piece.offset))
                for piece in integrity.pieces(size, CHUNK, described, tag)
            ]
        }

    async def hand_back(
        self,
        pool: str,
        *,
        parts: list[Part] | None = None,
        more: bool = False,
        swapped: bool = False,
        generation: int | None = None,
        mode: LeaseMode | None = None,
        epoch: int | None = None,
    ) -> protocol.Granted:
        """All chunks of the pool, or `parts` of them; `swapped` in the wrong order."""
        granted, then = self.leases[pool]
        tags = [(tag, fds) for (name, tag), fds in self.fds.items() if name == pool]
        named = parts if parts is not None else [Part(tag, 0, len(fds)) for tag, fds in tags]
        fds = [fd for part in named for fd in dict(tags)[part.tag][part.first : part.first + part.count]]
        message = protocol.Adopt(
            pool=pool,
            generation=granted.generation if generation is None else generation,
            mode=granted.mode if mode is None else mode,
            epoch=then if epoch is None else epoch,
            parts=named,
            more=more,
            fds=len(fds),
        )
        answer, locks = await self.life.service.adopt(self.client, message, fds[::-1] if swapped else fds)
        if isinstance(answer, protocol.Done):
            assert locks == []
            return granted
        return self._leased(pool, answer, locks, message.epoch)

    def _leased(self, pool: str, granted: protocol.Granted, fds: list[int], epoch: int) -> protocol.Granted:
        assert granted.fds == len(fds)
        self.locks += fds
        self.leases[pool] = granted, epoch
        return granted

    def _kept(self, pool: str, tag: str, fds: list[int]) -> None:
        for fd in self.fds.pop((pool, tag), []):
            os.close(fd)
        self.fds[pool, tag] = fds
