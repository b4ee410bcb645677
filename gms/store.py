"""The memory behind the allocations: waited for, made, filled, hashed and given back, all on the memory thread.

What takes long is cut into slices, so that others get their turn in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gms import fdpass, integrity
from gms.allocations import AllocationTable, Entry, NoRoomError
from gms.backends.base import (
    NO_DESCRIPTORS,
    DeviceError,
    ForeignPagesError,
    Hash,
    MemoryBackend,
    OutOfMemoryError,
    StillMappedError,
)
from gms.events import EventLog
from gms.integrity import Piece
from gms.leases import fenced
from gms.memory_thread import MemoryThread
from gms.protocol import ErrorCode, GmsError

log: Final = logging.getLogger("gms")

RETRY_SECONDS: Final = 0.25
"""How often one who waits for memory tries again without being told: the machine's memory is not only ours."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an allocation must know of all others. `evict` gives up something that nobody uses, if giving up all such
    would free so many bytes, and says whether it did; `lasting_bytes` is how much is held that does not go by itself;
    `wanted` turns False when a newer epoch has the pool."""

    evict: Callable[[int], bool]
    lasting_bytes: Callable[[], int]
    wanted: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    what: str
    since: float


class PageStore(Generic[P]):
    """The pages of a table's entries. `fail` is told, once and on any thread, of a device that cannot be gone on with;
    calls that it fails raise GmsError(internal)."""

    def __init__(
        self,
        backend: MemoryBackend[P],
        table: AllocationTable[P],
        events: EventLog,
        *,
        algorithm: Hash,
        fail: Callable[[DeviceError], None],
    ) -> None:
        self.backend = backend
        self._table = table
        self._events = events
        self._algorithm = algorithm
        self._thread = MemoryThread(fail)
        self._waiters: list[_Waiter] = []
        self._freed = asyncio.Event()

    async def allocate(self, entry: Entry[P], *, seconds: float, around: Surroundings) -> None:
        """Puts an entry into the table and memory behind it, or leaves nothing of it. Waits for room up to `seconds`,
        those who wait in the order they came; who does not wait does not stand in line.

        Raises GmsError: out_of_memory, retryable if room will come without anybody's doing; fenced, and what
        `AllocationTable.reserve` raises.
        """
        deadline = time.monotonic() + seconds
        waits = seconds > 0 and self._table.fits_beside(0, entry)
        in_line = waits and bool(self._waiters)
        problem = self._behind(entry, around) if in_line else await self._attempt(entry, around)
        if problem is None:
            return
        if not waits:
            raise problem
        waiter = self._wait_for(entry, seconds, problem)
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, RETRY_SECONDS)):
                        await self._freed.wait()
                if not around.wanted():
                    raise fenced(entry.pool)
                if self._waiters[0] is waiter:
                    problem = await self._attempt(entry, around)
                    if problem is None:
                        return
            raise problem if self._waiters[0] is waiter else self._behind(entry, around)
        finally:
            self._waiters.remove(waiter)
            self._wake()

    def waits(self) -> list[str]:
        """A sentence for each one that waits for memory."""
        now = time.monotonic()
        return [f"{waiter.what}, for {now - waiter.since:.1f} s" for waiter in self._waiters]

    def drop(self, pool: str, generation: int) -> int:
        """Gives a generation's memory back; returns the number of its allocations."""
        dropped = self._table.drop(pool, generation)
        for entry in dropped:
            self._destroy(entry)
        self._wake()
        return len(dropped)

    def discard(self, entry: Entry[P]) -> None:
        """Gives one allocation's memory back."""
        self._table.cancel(entry)
        self._destroy(entry)
        self._wake()

    async def freeze(self, entry: Entry[P]) -> None:
        """Raises GmsError(still_mapped)."""
        try:
            for pages in _all(entry):
                await self._thread.call(self.backend.freeze, pages)
        except StillMappedError as error:
            raise GmsError(
                ErrorCode.STILL_MAPPED,
                f"{entry.pool} was not committed: {entry.tag!r} still has a writable mapping; unmap it (in "
                "forked children too) and commit again.",
                retryable=True,
            ) from error
        entry.identities = [await self._thread.call(self.backend.identify, pages) for pages in _all(entry)]

    async def digests(self, entry: Entry[P], manifest: bytes) -> list[bytes]:
        """Those of the entry's pieces. Raises GmsError(not_found) if the entry goes meanwhile."""
        found: list[bytes] = []
        for batch in self._batches(integrity.pieces(entry.size_bytes, entry.chunk_bytes, manifest, entry.tag)):
            if not self._table.holds(entry):
                raise GmsError(ErrorCode.NOT_FOUND, f"{entry.tag!r} of {entry.pool} was given back meanwhile.")
            found += await self._thread.call(self._hash, list(_all(entry)), batch)
        return found

    def share(self, entry: Entry[P], first: int, most: int, *, writable: bool) -> list[int]:
        """New descriptors of at most `most` chunks from number `first` on; the caller closes them. Raises
        GmsError(busy)."""
        fds: list[int] = []
        try:
            for pages in list(_all(entry))[first : first + most]:
                fds.append(self.backend.share(pages, writable=writable))
        except BaseException as error:
            fdpass.close_all(fds)
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise _no_descriptors(f"give out {entry.tag!r} of {entry.pool}", error) from error
            raise
        return fds

    async def take_back(self, entry: Entry[P], index: int, fd: int) -> None:
        """One chunk of an earlier service, from a client that kept it. A chunk that is there already stays, and the
        client's is only compared. The caller keeps `fd`. Raises GmsError: mismatch; busy or out_of_memory, and the same
        chunk may come again."""
        if index >= len(entry.identities):
            count = len(entry.identities)
            raise GmsError(ErrorCode.MISMATCH, f"{entry.tag!r} of {entry.pool} has {count} chunks, none is {index}.")
        what = f"Chunk {index} of {entry.tag!r} in {entry.pool}"
        try:
            kept = os.dup(fd)  # the call may still be under way when the client is gone, and its descriptors closed
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise _no_descriptors(f"take back {entry.tag!r} of {entry.pool}", error) from error
            raise
        adoption = self._thread.submit(self._adopt, kept, entry, index)
        adoption.add_done_callback(lambda _: os.close(kept))
        try:
            pages = await self._pages(adoption)
        except ForeignPagesError as error:
            raise GmsError(
                ErrorCode.MISMATCH,
                f"{what} is not the one that was given out: {error}. It was not taken back; the client that handed it "
                "back has the wrong pages, or changed them.",
            ) from error
        except OutOfMemoryError as error:
            message = f"{what} cannot be taken back for now ({error}); keep it, and hand it back again."
            raise GmsError(ErrorCode.OUT_OF_MEMORY, message, retryable=True) from error
        if self._table.holds(entry) and entry.pages[index] is None:
            entry.pages[index] = pages
        else:
            self._submit_destroy(pages)

    def _adopt(self, fd: int, entry: Entry[P], index: int) -> P:
        identity = entry.identities[index]
        try:
            return self.backend.adopt(fd, identity)
        except ForeignPagesError:
            if entry.frozen:
                raise
            return self.backend.adopt(fd, self.backend.frozen(identity))

    def close(self) -> None:
        """Gives all memory back. No call may be under way."""
        for pool, generation in self._table.generations():
            self.drop(pool, generation)
        self._thread.close()

    async def _attempt(self, entry: Entry[P], around: Surroundings) -> NoRoomError | None:
        """None if the entry has its memory now, else why there is no room."""
        while True:
            try:
                self._table.reserve(entry, lasting=around.lasting_bytes)
                await self._fill(entry, around.wanted)
                return None
            except NoRoomError as error:
                problem = error
            if not around.evict(problem.missing_bytes):
                return problem

    async def _fill(self, entry: Entry[P], wanted: Callable[[], bool]) -> None:
        index = 0
        try:
            for index in range(entry.chunks):
                pages = await self._make_chunk(entry, entry.chunk_size(index))
                entry.pages[index] = pages
                entry.identities.append(await self._thread.call(self.backend.identify, pages))
                if not (wanted() and self._table.holds(entry)):
                    raise fenced(entry.pool)
        except BaseException as error:
            self._table.cancel(entry)
            self._destroy(entry)
            entry.identities.clear()
            if isinstance(error, OutOfMemoryError):
                room = entry.chunk_size(index) - 1 if error.room_bytes is None else error.room_bytes
                raise NoRoomError(
                    f"The device has no room for {entry.size_bytes} bytes as {entry.tag!r} in {entry.pool} ({error}); "
                    f"{self._table.held('here')}. Free memory, or allow the service more.",
                    missing_bytes=entry.size_bytes - index * entry.chunk_bytes - room,
                    retryable=True,
                ) from error
            raise

    async def _make_chunk(self, entry: Entry[P], size: int) -> P:
        pages = await self._pages(self._thread.submit(self.backend.create, entry.tag, size))
        try:
            for offset in range(0, size, self.backend.slice_bytes):
                part = min(self.backend.slice_bytes, size - offset)
                await self._thread.call(self.backend.populate, pages, offset, part)
        except BaseException:
            self._submit_destroy(pages)
            raise
        return pages

    def _hash(self, chunks: list[P], batch: list[Piece]) -> list[bytes]:
        return [
            self.backend.digest(chunks[piece.chunk], piece.offset, piece.length, self._algorithm) for piece in batch
        ]

    def _batches(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """As many pieces as make a slice: small tensors are many, and each turn on the thread costs."""
        batch: list[Piece] = []
        size = 0
        for piece in pieces:
            batch.append(piece)
            size += piece.length
            if size >= self.backend.slice_bytes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    async def _pages(self, making: ThreadFuture[P]) -> P:
        """The pages that a call makes. If nobody waits for them any more they are destroyed behind that call."""
        try:
            return await self._thread.result(making)
        except asyncio.CancelledError:
            self._thread.submit(self._destroy_result, making).add_done_callback(_destroyed)
            raise

    def _behind(self, entry: Entry[P], around: Surroundings) -> GmsError:
        message = (
            f"{entry.size_bytes} bytes for {entry.tag!r} in {entry.pool} must wait for those who wait for memory "
            f"already: {self._waiters[0].what}. Wait longer, or end one of the holders: {self._table.held()}."
        )
        fits = self._table.fits_beside(around.lasting_bytes(), entry)
        return GmsError(ErrorCode.OUT_OF_MEMORY, message, retryable=fits)

    def _wait_for(self, entry: Entry[P], seconds: float, problem: GmsError) -> _Waiter:
        what = f"{entry.owner} waits for {entry.size_bytes} bytes as {entry.tag!r} in {entry.pool}"
        waiter = _Waiter(what, time.monotonic())
        self._waiters.append(waiter)
        detail = f"{what}, up to {seconds:.1f} s: {problem}"
        self._events.emit("memory_wait", detail, pool=entry.pool, client=entry.owner)
        return waiter

    def _wake(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()

    def _destroy(self, entry: Entry[P]) -> None:
        for index, pages in enumerate(entry.pages):
            if pages is not None:
                entry.pages[index] = None
                self._submit_destroy(pages)

    def _submit_destroy(self, pages: P) -> None:
        self._thread.submit(self.backend.destroy, pages).add_done_callback(_destroyed)

    def _destroy_result(self, making: ThreadFuture[P]) -> None:
        """On the memory thread, for pages whose client left while they were made."""
        if not making.cancelled() and making.exception() is None:
            self.backend.destroy(making.result())


def _no_descriptors(what: str, error: OSError) -> GmsError:
    message = f"The service cannot {what} for now: {error.strerror}. Try again, or allow it more files (ulimit -n)."
    return GmsError(ErrorCode.BUSY, message, retryable=True)


def _destroyed(done: ThreadFuture[None]) -> None:
    if (error := done.exception()) is not None:
        log.error("memory could not be given back: %s", error)


def _all(entry: Entry[P]) -> Iterator[P]:
    """The chunks of a filled entry."""
    for pages in entry.pages:
        if pages is None:
            raise GmsError(
                ErrorCode.NOT_FOUND, f"{entry.tag!r} in {entry.pool} is still being filled; ask again.", retryable=True
            )
        yield pages
