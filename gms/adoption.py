"""Taking pages back after a restart: what the journal says stood here, from the clients that still have it.

A restored pool is ADOPTING until all its chunks are here and, where the service can read them, hashed and compared; or
until no client that held it lives any more; or until a deadline. Weights are taken back from any reader. KV pages are
taken back only from the holder of the journalled epoch: anyone else has no business to have them. The same road serves
a client whose connection alone broke: its pages are here, it shows them, and has its lease again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Generic, TypeVar

from gms.allocations import AllocationTable, Entry
from gms.arbiter import staged
from gms.checking import Checker
from gms.events import EventLog
from gms.journal import Journal, PoolRecord
from gms.leases import Pool, fenced
from gms.leasing import Leasing
from gms.protocol import Adopt, ErrorCode, GmsError, LeaseMode
from gms.store import PageStore

LOOK_SECONDS: Final = 0.05
"""How often it is asked whether holders of ADOPTING pools live: a lock file does not announce its freeing."""

P = TypeVar("P")


class Adopter(Generic[P]):
    """One service's, for the pools of the journal that it found."""

    def __init__(
        self,
        *,
        leasing: Leasing[P],
        table: AllocationTable[P],
        store: PageStore[P],
        checker: Checker[P],
        journal: Journal,
        events: EventLog,
        seconds: float,
    ) -> None:
        self._leasing = leasing
        self._arbiter = leasing.arbiter
        self._table = table
        self._store = store
        self._checker = checker
        self._journal = journal
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._deadline = self._loop.time() + seconds
        self._conclusions: dict[str, asyncio.Task[None]] = {}
        self._settled: dict[str, asyncio.Future[None]] = {}
        self._given_up: dict[str, str] = {}  # pool -> why its pages are not taken back any more
        self._timer: asyncio.TimerHandle | None = None

    def restore(self, records: list[PoolRecord]) -> None:
        """Puts the pools of a journal in place; those that somebody can hand back are ADOPTING."""
        for record in records:
            self._restore(record)
        for file, problem in self._journal.damage.items():
            detail = f"The journal file {file} cannot be used: {problem}."
            self._events.emit("journal", detail, level=logging.ERROR)
        if self._arbiter.adopting():
            self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._conclusions.values():
            task.cancel()
        for waiting in self._settled.values():
            waiting.cancel()

    async def hand_back(self, client: int, label: str, message: Adopt, fds: list[int]) -> None:
        """Checks the descriptors, which stay the caller's, and keeps pages of theirs. After the last message the client
        has its lease. Raises GmsError: mismatch, fenced, corrupt, not_permitted, bad_fds, already_attached."""
        pool = self._expected(client, message)
        for tag, index, fd in _numbered(message, fds):
            entry = self._table.get(message.pool, message.generation, tag)
            if entry is None:
                raise GmsError(ErrorCode.MISMATCH, f"{message.pool} has no {tag!r}; {label} hands back something else.")
            await self._store.take_back(entry, index, fd)
            self._expected(client, message)  # it may have been given up meanwhile
        if message.more:
            return
        if not staged(message.pool):
            self._complete(message)
            self._leasing.apply(self._arbiter.adopted(message.pool, client))
        elif pool.adopting:
            await self._all_back(message)
        if staged(message.pool):
            self._expected(client, message)
            self._arbiter.rejoin(client, message.pool)
        self._given_up.pop(message.pool, None)
        detail = f"{label} handed back {message.pool}, generation {message.generation}, epoch {message.epoch}"
        self._events.emit("handed_back", detail, pool=message.pool, client=label)

    def _restore(self, record: PoolRecord) -> None:
        if record.device_id != self._store.backend.device_id:
            detail = (
                f"{record.pool} was on {record.device_id}, this is {self._store.backend.device_id}: not taken back."
            )
            self._events.emit("journal", detail, pool=record.pool, level=logging.WARNING)
            return
        alive = bool(record.generation and record.allocations) and self._journal.alive(record.pool, record.generation)
        adopting = record.generation if alive else 0
        self._arbiter.restore(record.pool, adopting=adopting, fence=record.fence, lease_epoch=record.lease_epoch)
        if not alive:
            return
        for kept in record.allocations:
            entry: Entry[P] = Entry(
                record.pool,
                record.generation,
                kept.tag,
                kept.size_bytes,
                kept.chunk_bytes,
                kept.owner,
                identities=list(kept.identities),
                digests=list(kept.digests),
            )
            self._table.restore(entry)
        self._table.put_manifest(record.pool, record.generation, record.manifest)
        size = self._table.bytes_of(record.pool, record.generation)
        detail = f"{record.pool}, generation {record.generation}, {size} bytes, is to be handed back by its holders"
        self._events.emit("adopting", f"{detail}, within {self._seconds:g} s", pool=record.pool)

    def _expected(self, client: int, message: Adopt) -> Pool:
        """The pool, if this client may hand this generation back to it."""
        name = message.pool
        if message.mode is not (LeaseMode.RO if staged(name) else LeaseMode.RW):
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{name} cannot be handed back as {message.mode}.")
        if self._arbiter.lease(client, name) is not None:
            raise GmsError(ErrorCode.ALREADY_ATTACHED, f"This connection holds {name} already.")
        pool = self._arbiter.pools.get(name)
        if not staged(name):
            return self._expected_holder(client, message, pool)
        if pool is not None and pool.corrupt:
            raise GmsError(ErrorCode.CORRUPT, f"{name} is not taken back: {pool.corrupt}.")
        if pool is None or pool.standing != message.generation:
            raise GmsError(
                ErrorCode.MISMATCH,
                f"Generation {message.generation} of {name} is not taken back: {self._why_not(name, pool)}. Whoever "
                "has it mapped can go on, but shares it with nobody any more.",
            )
        return pool

    def _expected_holder(self, client: int, message: Adopt, pool: Pool | None) -> Pool:
        if pool is None:
            reason = self._why_not(message.pool, None)
            raise GmsError(ErrorCode.MISMATCH, f"{message.pool} is not taken back: {reason}.")
        if message.epoch < pool.lease_epoch or pool.standing != message.generation or not pool.may_return(client):
            if message.epoch <= pool.epoch and (pool.standing or pool.epoch > message.epoch):
                raise fenced(message.pool)
            reason = self._why_not(message.pool, pool)
            raise GmsError(ErrorCode.MISMATCH, f"{message.pool} is not taken back: {reason}.")
        if message.epoch != pool.lease_epoch:
            raise GmsError(
                ErrorCode.MISMATCH, f"{message.pool} was last granted to epoch {pool.lease_epoch}, not {message.epoch}."
            )
        return pool

    def _why_not(self, name: str, pool: Pool | None) -> str:
        if name in self._given_up:
            return self._given_up[name]
        if self._journal.damage:
            return f"the journal was damaged ({'; '.join(f'{f}: {p}' for f, p in self._journal.damage.items())})"
        if pool is not None and pool.standing:
            return f"generation {pool.standing} stands there by now"
        return "the journal does not know it"

    def _complete(self, message: Adopt) -> None:
        missing = [e.tag for e in self._table.entries(message.pool, message.generation) if not e.filled]
        if missing:
            names = ", ".join(map(repr, missing))
            raise GmsError(ErrorCode.MISMATCH, f"{message.pool} is not taken back: {names} are missing or incomplete.")

    async def _all_back(self, message: Adopt) -> None:
        """Until the pool is open again, which may take others' chunks, and hashing all of them. Raises GmsError if it
        comes to nothing."""
        pool = message.pool
        settled = self._settled.setdefault(pool, self._loop.create_future())
        complete = all(entry.filled for entry in self._table.entries(pool, message.generation))
        if complete and pool not in self._conclusions:
            task = self._loop.create_task(self._conclude(pool, message.generation))
            self._conclusions[pool] = task
            task.add_done_callback(lambda done: self._concluded(pool, done))
        await asyncio.shield(settled)

    async def _conclude(self, pool: str, generation: int) -> None:
        """Everything is here: opens the pool if it is what was committed. A task of its own, since the client that
        brought the last chunk may go."""
        if self._checker.reads:
            for entry in self._table.entries(pool, generation):
                if (wrong := await self._checker.fault(entry, {})) is not None:
                    self._leasing.condemn(pool, wrong)
                    return
        self._leasing.apply(self._arbiter.adopted(pool, 0))
        size = self._table.bytes_of(pool, generation)
        how = "checksums match" if self._checker.reads else "its clients attest to its content"
        self._events.emit("adopted", f"{pool}, generation {generation}: {size} bytes are taken back, {how}", pool=pool)

    def _concluded(self, pool: str, done: asyncio.Task[None]) -> None:
        self._conclusions.pop(pool, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._give_up(pool, f"it could not be checked ({error})")
        self._release_waiting(pool)

    def _release_waiting(self, pool: str) -> None:
        if (settled := self._settled.pop(pool, None)) is not None and not settled.done():
            settled.set_result(None)

    def _look(self) -> None:
        """Ends what nobody will end."""
        self._timer = None
        late = self._loop.time() >= self._deadline
        for pool in self._arbiter.adopting():
            if pool in self._conclusions:
                continue
            if not self._journal.alive(pool, self._arbiter.pools[pool].standing):
                self._give_up(pool, "nobody who held it lives any more")
            elif late:
                self._give_up(pool, f"nobody handed all of it back within {self._seconds:g} s")
        if self._arbiter.adopting():
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _give_up(self, pool: str, reason: str) -> None:
        self._given_up[pool] = reason
        self._events.emit("given_up", f"{pool} starts empty: {reason}", pool=pool, level=logging.WARNING)
        self._leasing.apply(self._arbiter.settle(pool))
        self._release_waiting(pool)


def _numbered(message: Adopt, fds: list[int]) -> list[tuple[str, int, int]]:
    """Tag, chunk number and descriptor. Raises GmsError if the counts differ."""
    if sum(part.count for part in message.parts) != len(fds):
        raise GmsError(ErrorCode.BAD_FDS, f"{len(fds)} descriptors came for other parts than the message names.")
    numbers = [(part.tag, index) for part in message.parts for index in range(part.first, part.first + part.count)]
    return [(tag, index, fd) for (tag, index), fd in zip(numbers, fds, strict=True)]
