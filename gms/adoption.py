"""Taking pages back after a restart: what the journal says stood here, from the clients that still have it.

A restored pool is ADOPTING until all its chunks are here and, where the service can read them, hashed and compared; or
until no client that held it lives any more; or until a deadline. Weights are taken back from any reader; those that
were being committed, from their writer, who writes on. KV pages are taken back only from the holder of the journalled
epoch: anyone else has no business to have them. The same road serves a client whose connection alone broke: its pages
are here, it shows them, and has its lease again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Generic, TypeVar

from gms.allocations import AllocationTable, Entry
from gms.arbiter import staged
from gms.checking import Checker
from gms.clients import Client
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
        algorithm: str,
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
        self._algorithm = algorithm
        self._processes: dict[str, int] = {}  # pool -> how many stood behind its holder
        self._conclusions: dict[str, asyncio.Task[None]] = {}
        self._settled: dict[str, asyncio.Future[None]] = {}
        self._given_up: dict[str, str] = {}  # pool -> why its pages are not taken back any more
        self._timer: asyncio.TimerHandle | None = None

    def restore(self, records: list[PoolRecord]) -> None:
        """Puts the pools of a journal in place; those that somebody can hand back are ADOPTING. Raises
        GmsError(wrong_device) if holders of another device's pages live: this is not their service."""
        for record in records:
            self._check_device(record)
        weights: dict[str, list[PoolRecord]] = {}
        for record in records:
            if staged(record.pool):
                weights.setdefault(record.pool, []).append(record)
            else:
                self._restore_kv(record)
        for pool, found in weights.items():
            self._restore_weights(pool, found)
        for file, problem in self._journal.damage.items():
            detail = f"The journal file {file} cannot be used: {problem}."
            self._events.emit("journal", detail, level=logging.ERROR)
        if self._arbiter.awaited():
            self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._conclusions.values():
            task.cancel()
        for waiting in self._settled.values():
            waiting.cancel()

    async def hand_back(self, client: Client, message: Adopt, fds: list[int]) -> None:
        """Checks the descriptors, which stay the caller's, and keeps pages of theirs. After the last message the client
        has its lease. Raises GmsError: mismatch, fenced, corrupt, not_permitted, bad_fds, already_attached."""
        self._check(client, message)
        for tag, index, fd in _numbered(message, fds):
            entry = self._table.get(message.pool, message.generation, tag)
            if entry is None:
                what = f"{message.pool} has no {tag!r}; {client.label} hands back something else."
                raise GmsError(ErrorCode.MISMATCH, what)
            await self._store.take_back(entry, index, fd)
            self._check(client, message)  # it may have been given up meanwhile
        if message.more:
            return
        if not staged(message.pool):
            self._drop_what_is_missing(message)
            self._leasing.apply(self._arbiter.adopted(message.pool, client.id))
        elif message.mode is LeaseMode.RW:
            self._complete(message)
            self._arbiter.write_on(client.id, message.pool)
        else:
            if message.generation in self._arbiter.pools[message.pool].awaited:
                await self._all_back(message)
                self._check(client, message)
            self._arbiter.rejoin(client.id, message.pool)
        self._given_up.pop(message.pool, None)
        detail = f"{client.label} handed back {message.pool}, generation {message.generation}, epoch {message.epoch}"
        self._events.emit("handed_back", detail, pool=message.pool, client=client.label)

    def _check_device(self, record: PoolRecord) -> None:
        here = self._store.backend.device_id
        if record.device_id != here and self._journal.alive(record.pool, record.generation):
            raise GmsError(
                ErrorCode.WRONG_DEVICE,
                f"Engines that live hold {record.pool} of the device {record.device_id} by this socket, and this "
                f"service has {here}; use another socket for it, or end them first.",
            )

    def _restore_weights(self, pool: str, records: list[PoolRecord]) -> None:
        """At most two: what was committed (or condemned), and what was being committed."""
        alive = [record for record in records if self._is_alive(record)]
        committed = next((record for record in alive if not record.committing and not record.corrupt), None)
        returning = next((record for record in alive if record.committing), None)
        if returning is not None and committed is not None and returning.generation == committed.generation:
            returning = None  # the service died just after the commit
        condemned = {
            generation: reason
            for record in records
            for generation, reason in record.condemned.items()
            if self._journal.alive(pool, generation)
        }
        if committed is None and returning is None and not condemned:
            return
        self._arbiter.restore_weights(
            pool,
            adopting=committed.generation if committed is not None else 0,
            returning=returning.generation if returning is not None else 0,
            corrupt="" if committed is not None else condemned.get(max(condemned, default=0), ""),
            condemned=condemned,
        )
        for record in (committed, returning):
            if record is not None:
                self._expect(record)

    def _restore_kv(self, record: PoolRecord) -> None:
        alive = self._is_alive(record)
        self._arbiter.restore_kv(
            record.pool,
            adopting=record.generation if alive else 0,
            fence=record.fence,
            lease_epoch=record.lease_epoch,
        )
        self._processes[record.pool] = record.processes
        if alive:
            self._expect(record)

    def _is_alive(self, record: PoolRecord) -> bool:
        """Whether there is something to hand back, or to be told of, and somebody for it."""
        matters = bool(record.generation and record.allocations)
        known = record.device_id == self._store.backend.device_id
        return matters and known and self._journal.alive(record.pool, record.generation)

    def _expect(self, record: PoolRecord) -> None:
        """Puts what the record describes into the table, without memory so far."""
        comparable = record.algorithm == self._algorithm
        for kept in record.allocations:
            entry: Entry[P] = Entry(
                record.pool,
                record.generation,
                kept.tag,
                kept.size_bytes,
                kept.chunk_bytes,
                kept.owner,
                identities=list(kept.identities),
                digests=list(kept.digests) if comparable else [],
                frozen=not record.committing,
            )
            self._table.restore(entry)
        self._table.put_manifest(record.pool, record.generation, record.manifest)
        size = self._table.bytes_of(record.pool, record.generation)
        detail = f"{record.pool}, generation {record.generation}, {size} bytes, is to be handed back by its holders"
        self._events.emit("adopting", f"{detail}, within {self._seconds:g} s", pool=record.pool)

    def _check(self, client: Client, message: Adopt) -> None:
        """Whether this client may hand this generation back in this way."""
        name = message.pool
        if self._arbiter.lease(client.id, name) is not None:
            raise GmsError(ErrorCode.ALREADY_ATTACHED, f"This connection holds {name} already.")
        pool = self._arbiter.pools.get(name)
        if not staged(name):
            self._check_holder(client, message, pool)
            return
        if message.mode is LeaseMode.RW_OR_RO:
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{name} is handed back as ro, or by its writer as rw.")
        if pool is not None and (wrong := pool.condemned.get(message.generation)) is not None:
            raise GmsError(ErrorCode.CORRUPT, f"{name} is not taken back: {wrong}.")
        writing = pool is not None and message.generation != pool.standing and message.generation in pool.awaited
        known = writing if message.mode is LeaseMode.RW else pool is not None and pool.standing == message.generation
        if not known:
            raise GmsError(
                ErrorCode.MISMATCH,
                f"Generation {message.generation} of {name} is not taken back: {self._why_not(name, pool)}. Whoever "
                "has it mapped can go on, but shares it with nobody any more.",
            )

    def _check_holder(self, client: Client, message: Adopt, pool: Pool | None) -> None:
        if message.mode is not LeaseMode.RW:
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{message.pool} cannot be handed back as {message.mode}.")
        if pool is None:
            reason = self._why_not(message.pool, None)
            raise GmsError(ErrorCode.MISMATCH, f"{message.pool} is not taken back: {reason}.")
        if message.epoch < pool.lease_epoch or pool.standing != message.generation or not pool.may_return(client.id):
            if message.epoch <= pool.epoch and (pool.standing or pool.epoch > message.epoch):
                raise fenced(message.pool)
            reason = self._why_not(message.pool, pool)
            raise GmsError(ErrorCode.MISMATCH, f"{message.pool} is not taken back: {reason}.")
        if message.epoch != pool.lease_epoch:
            raise GmsError(
                ErrorCode.MISMATCH, f"{message.pool} was last granted to epoch {pool.lease_epoch}, not {message.epoch}."
            )
        if pool.awaited and client.pidfds < self._processes.get(message.pool, 0):
            raise GmsError(
                ErrorCode.MISMATCH,
                f"{message.pool} was held by {self._processes[message.pool]} processes, and {client.pidfds} came back: "
                "the end of the others could not be proved. Send the pidfds of all ranks.",
            )

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

    def _drop_what_is_missing(self, message: Adopt) -> None:
        """What earlier holders left under other tags is nobody's to hand back: it goes with the service that had it."""
        entries = self._table.entries(message.pool, message.generation)
        if not any(entry.filled for entry in entries):
            self._complete(message)
        for entry in entries:
            if not entry.filled:
                self._store.discard(entry)

    async def _all_back(self, message: Adopt) -> None:
        """Until the pool is open again, which may take others' chunks, and hashing all of them. Raises GmsError if it
        comes to nothing."""
        pool = message.pool
        settled = self._settled.setdefault(pool, self._loop.create_future())
        complete = all(entry.filled for entry in self._table.entries(pool, message.generation))
        if complete and pool not in self._conclusions:
            task = self._loop.create_task(self._conclude(pool, message.generation))
            self._conclusions[pool] = task
            task.add_done_callback(lambda done: self._concluded(pool, message.generation, done))
        await asyncio.shield(settled)

    async def _conclude(self, pool: str, generation: int) -> None:
        """Everything is here: opens the pool if it is what was committed. A task of its own, since the client that
        brought the last chunk may go."""
        checked = self._checker.reads
        if checked:
            manifest = self._table.manifest(pool, generation)
            for entry in self._table.entries(pool, generation):
                if not entry.digests:  # of another algorithm: its inode and seals must do, as on a first commit
                    entry.digests = await self._checker.to_keep(entry, manifest, {})
                if (wrong := await self._checker.fault(entry, {})) is not None:
                    self._leasing.condemn(pool, wrong)
                    return
        self._leasing.apply(self._arbiter.adopted(pool, 0))
        size = self._table.bytes_of(pool, generation)
        how = "checksums match" if checked else "its clients attest to its content"
        self._events.emit("adopted", f"{pool}, generation {generation}: {size} bytes are taken back, {how}", pool=pool)

    def _concluded(self, pool: str, generation: int, done: asyncio.Task[None]) -> None:
        self._conclusions.pop(pool, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._give_up(pool, generation, f"it could not be checked ({error})")
        self._release_waiting(pool)

    def _release_waiting(self, pool: str) -> None:
        if (settled := self._settled.pop(pool, None)) is not None and not settled.done():
            settled.set_result(None)

    def _look(self) -> None:
        """Ends what nobody will end."""
        self._timer = None
        late = self._loop.time() >= self._deadline
        for pool, generation in self._arbiter.awaited():
            if pool in self._conclusions:
                continue
            if not self._journal.alive(pool, generation):
                self._give_up(pool, generation, "nobody who held it lives any more")
            elif late:
                self._give_up(pool, generation, f"nobody handed all of it back within {self._seconds:g} s")
        awaited = {pool for pool, _ in self._arbiter.awaited()}
        for pool in self._settled.keys() - awaited - self._conclusions.keys():
            self._release_waiting(pool)  # a commit, or a newer epoch, made the hand-back out of date
        if awaited or self._settled:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _give_up(self, pool: str, generation: int, reason: str) -> None:
        self._given_up[pool] = reason
        detail = f"{pool}: generation {generation} will not come back: {reason}"
        self._events.emit("given_up", detail, pool=pool, level=logging.WARNING)
        self._leasing.apply(self._arbiter.settle(pool, generation))
        self._release_waiting(pool)


def _numbered(message: Adopt, fds: list[int]) -> list[tuple[str, int, int]]:
    """Tag, chunk number and descriptor. Raises GmsError if the counts differ."""
    if sum(part.count for part in message.parts) != len(fds):
        raise GmsError(ErrorCode.BAD_FDS, f"{len(fds)} descriptors came for other parts than the message names.")
    numbers = [(part.tag, index) for part in message.parts for index in range(part.first, part.first + part.count)]
    return [(tag, index, fd) for (tag, index), fd in zip(numbers, fds, strict=True)]
