"""The memory behind the allocations: made, filled, hashed and given back, all on one thread of its own.

The calls run one after the other. That order is what makes it safe to destroy pages while a call on them is still under
way: the destruction queues up behind it. What takes long is cut into slices, so that others get their turn in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeVar

from gms import fdpass, integrity
from gms.allocations import AllocationTable, Entry
from gms.backends.base import DeviceError, ForeignPagesError, Hash, MemoryBackend, OutOfMemoryError, StillMappedError
from gms.events import EventLog
from gms.integrity import Piece
from gms.leases import fenced
from gms.protocol import ErrorCode, GmsError

log: Final = logging.getLogger("gms")

RETRY_SECONDS: Final = 0.25
"""How often one who waits for memory tries again without being told: the machine's memory is not only ours."""

P = TypeVar("P")
A = ParamSpec("A")
R = TypeVar("R")


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
        self._fail = fail
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gms-memory")
        self._waiters: list[_Waiter] = []
        self._freed = asyncio.Event()
        self._failed = False

    async def allocate(
        self, entry: Entry[P], *, seconds: float, evict: Callable[[], bool], wanted: Callable[[], bool]
    ) -> None:
        """Puts an entry into the table and memory behind it, or leaves nothing of it. Waits for room up to `seconds`,
        those who wait in the order they came; who does not wait does not stand in line. `evict` gives up something
        unused and says whether there was any; `wanted` turns False when a newer epoch has the pool.

        Raises GmsError: out_of_memory, fenced, and what `AllocationTable.reserve` raises.
        """
        deadline = time.monotonic() + seconds
        in_line = seconds > 0 and bool(self._waiters)
        problem = self._behind(entry) if in_line else await self._attempt(entry, evict, wanted)
        if problem is None:
            return
        if seconds <= 0 or not problem.retryable:
            raise problem
        waiter = self._wait_for(entry, seconds, problem)
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, RETRY_SECONDS)):
                        await self._freed.wait()
                if not wanted():
                    raise fenced(entry.pool)
                if self._waiters[0] is waiter:
                    problem = await self._attempt(entry, evict, wanted)
                    if problem is None:
                        return
                    if not problem.retryable:
                        break
            raise problem
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
                await self._call(self.backend.freeze, pages)
        except StillMappedError as error:
            raise GmsError(
                ErrorCode.STILL_MAPPED,
                f"{entry.pool} was not committed: {entry.tag!r} still has a writable mapping; unmap it (in "
                "forked children too) and commit again.",
                retryable=True,
            ) from error
        entry.identities = [await self._call(self.backend.identify, pages) for pages in _all(entry)]

    async def digests(self, entry: Entry[P], manifest: bytes) -> list[bytes]:
        """Those of the entry's pieces. Raises GmsError(not_found) if the entry goes meanwhile."""
        found: list[bytes] = []
        for batch in self._batches(integrity.pieces(entry.size_bytes, entry.chunk_bytes, manifest, entry.tag)):
            if not self._table.holds(entry):
                raise GmsError(ErrorCode.NOT_FOUND, f"{entry.tag!r} of {entry.pool} was given back meanwhile.")
            found += await self._call(self._hash, list(_all(entry)), batch)
        return found

    def share(self, entry: Entry[P], first: int, most: int, *, writable: bool) -> list[int]:
        """New descriptors of at most `most` chunks from number `first` on; the caller closes them."""
        fds: list[int] = []
        try:
            for pages in list(_all(entry))[first : first + most]:
                fds.append(self.backend.share(pages, writable=writable))
        except BaseException:
            fdpass.close_all(fds)
            raise
        return fds

    async def take_back(self, entry: Entry[P], index: int, fd: int) -> None:
        """One chunk of an earlier service, from a client that kept it. A chunk that is there already stays, and the
        client's is only compared. The caller keeps `fd`. Raises GmsError(mismatch)."""
        if index >= len(entry.identities):
            count = len(entry.identities)
            raise GmsError(ErrorCode.MISMATCH, f"{entry.tag!r} of {entry.pool} has {count} chunks, none is {index}.")
        kept = os.dup(fd)  # the call may still be under way when the client is gone, and its descriptors closed
        adoption = self._submit(self._adopt, kept, entry, index)
        adoption.add_done_callback(lambda _: os.close(kept))
        try:
            pages = await self._pages(adoption)
        except ForeignPagesError as error:
            raise GmsError(
                ErrorCode.MISMATCH,
                f"Chunk {index} of {entry.tag!r} in {entry.pool} is not what was given out: {error}. It was not taken "
                "back; whoever handed it back has the wrong pages, or changed them.",
            ) from error
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
        self._thread.shutdown(wait=True)

    async def _attempt(self, entry: Entry[P], evict: Callable[[], bool], wanted: Callable[[], bool]) -> GmsError | None:
        """None if the entry has its memory now, else why there is no room."""
        while True:
            try:
                self._table.reserve(entry)
                await self._fill(entry, wanted)
                return None
            except GmsError as error:
                if error.code != ErrorCode.OUT_OF_MEMORY:
                    raise
                problem = error
            if not problem.retryable or not evict():
                return problem

    async def _fill(self, entry: Entry[P], wanted: Callable[[], bool]) -> None:
        try:
            for index in range(entry.chunks):
                pages = await self._make_chunk(entry, entry.chunk_size(index))
                entry.pages[index] = pages
                entry.identities.append(await self._call(self.backend.identify, pages))
                if not (wanted() and self._table.holds(entry)):
                    raise fenced(entry.pool)
        except BaseException as error:
            self._table.cancel(entry)
            self._destroy(entry)
            entry.identities.clear()
            if isinstance(error, OutOfMemoryError):
                raise GmsError(
                    ErrorCode.OUT_OF_MEMORY,
                    f"The device has no room for {entry.size_bytes} bytes as {entry.tag!r} in {entry.pool} ({error}); "
                    f"held here are {self._table.holders()}. Free memory, or allow the service more.",
                    retryable=True,
                ) from error
            raise

    async def _make_chunk(self, entry: Entry[P], size: int) -> P:
        pages = await self._pages(self._submit(self.backend.create, entry.tag, size))
        try:
            for offset in range(0, size, self.backend.slice_bytes):
                part = min(self.backend.slice_bytes, size - offset)
                await self._call(self.backend.populate, pages, offset, part)
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

    async def _call(self, function: Callable[A, R], *arguments: A.args, **named: A.kwargs) -> R:
        return await self._result(self._submit(function, *arguments, **named))

    async def _pages(self, making: ThreadFuture[P]) -> P:
        """The pages that a call makes. If nobody waits for them any more they are destroyed behind that call."""
        try:
            return await self._result(making)
        except asyncio.CancelledError:
            self._submit(self._destroy_result, making)
            raise

    async def _result(self, pending: ThreadFuture[R]) -> R:
        try:
            return await asyncio.wrap_future(pending)
        except DeviceError as error:
            raise GmsError(ErrorCode.INTERNAL, f"{error} The memory service ends; it is to be restarted.") from error

    def _submit(self, function: Callable[A, R], *arguments: A.args, **named: A.kwargs) -> ThreadFuture[R]:
        pending = self._thread.submit(function, *arguments, **named)
        pending.add_done_callback(self._watch)
        return pending

    def _watch(self, done: ThreadFuture[Any]) -> None:
        """A device that fails is told of even if nobody waits for the call any more."""
        error = None if done.cancelled() else done.exception()
        if isinstance(error, DeviceError) and not self._failed:
            self._failed = True
            self._fail(error)

    def _behind(self, entry: Entry[P]) -> GmsError:
        message = (
            f"{entry.size_bytes} bytes for {entry.tag!r} in {entry.pool} must wait for those who wait for memory "
            f"already: {self._waiters[0].what}. Wait longer, or end one of the holders: {self._table.holders()}."
        )
        return GmsError(ErrorCode.OUT_OF_MEMORY, message, retryable=True)

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
        self._submit(self.backend.destroy, pages).add_done_callback(_destroyed)

    def _destroy_result(self, making: ThreadFuture[P]) -> None:
        """On the memory thread, for pages whose client left while they were made."""
        if not making.cancelled() and making.exception() is None:
            self.backend.destroy(making.result())


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
