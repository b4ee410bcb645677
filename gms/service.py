"""What the memory service does, apart from sockets: the arbiter decides, the store has the memory, the journal tells
the next service.

Everything here runs on the event loop; what takes long runs on the store's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from gms import protocol, reporting
from gms.adoption import Adopter
from gms.allocations import MAX_CHUNKS, AllocationTable, Entry
from gms.arbiter import Arbiter, staged
from gms.backends.base import DeviceError, Hash, MemoryBackend
from gms.checking import Checker
from gms.clients import Client
from gms.events import EventLog
from gms.journal import Journal, PoolRecord
from gms.leasing import Leasing
from gms.ledger import Ledger
from gms.protocol import MAX_FDS, Digests, ErrorCode, GmsError, LeaseMode, Status
from gms.store import PageStore, Surroundings

ADOPT_SECONDS: Final = 30.0
CHECK_SECONDS: Final = 2.0
"""How often the journal is looked after."""

P = TypeVar("P")


class Observer(Protocol):
    """What the metrics want to hear about."""

    def attached(self, pool: str, mode: str, seconds: float) -> None: ...
    def refused(self, code: str) -> None: ...
    def allocated(self, pool: str, size_bytes: int, seconds: float) -> None: ...
    def hashed(self, size_bytes: int, seconds: float) -> None: ...
    def handed_back(self, pool: str, outcome: str, seconds: float) -> None: ...


class MemoryService(Generic[P]):
    """One device's pools. `limit_bytes` bounds what is allocated at a time, None leaves it to the machine; without a
    `journal` nothing outlives the service. Digests by another `algorithm_name` are not compared. `fail` is told, on any
    thread, of a device that cannot be gone on with. Raises GmsError(wrong_device) if the journal is another device's,
    and engines that live count on it. `max_chunks` is what its process can open files for."""

    def __init__(
        self,
        backend: MemoryBackend[P],
        *,
        device: str,
        algorithm: Hash,
        algorithm_name: str = "",
        journal: Journal | None = None,
        limit_bytes: int | None = None,
        max_chunks: int = MAX_CHUNKS,
        adopt_seconds: float = ADOPT_SECONDS,
        observer: Observer | None = None,
        fail: Callable[[DeviceError], None],
    ) -> None:
        self.device = device
        self.device_id = backend.device_id
        self.events = EventLog()
        self._backend = backend
        self._algorithm_name = algorithm_name
        self._observer = observer
        self._table: AllocationTable[P] = AllocationTable(limit_bytes, max_chunks=max_chunks)
        self._store = PageStore(backend, self._table, self.events, algorithm=algorithm, fail=fail)
        self._checker = Checker(self._store, self._table, observer)
        self._loop = asyncio.get_running_loop()
        records = journal.load() if journal is not None else []
        self._arbiter = Arbiter(after=journal.highest_generation if journal is not None else 0)
        self._ledger = Ledger(
            journal,
            arbiter=self._arbiter,
            table=self._table,
            events=self.events,
            device_id=self.device_id,
            algorithm=algorithm_name,
        )
        self._leasing = Leasing(
            arbiter=self._arbiter, table=self._table, store=self._store, ledger=self._ledger, events=self.events
        )
        self._adopter = (
            None if journal is None else self._start_adopter(journal, records, algorithm_name, adopt_seconds)
        )
        self._tending = self._loop.call_later(CHECK_SECONDS, self._tend)

    def _tend(self) -> None:
        self._ledger.check()
        for client, pool in self._ledger.unlocked():
            self._leasing.renew(client, pool)
        self._tending = self._loop.call_later(CHECK_SECONDS, self._tend)

    def expel_with(self, expel: Callable[[int], None]) -> None:
        """`expel` ends a client's connection: its leases are not what it takes them for any more, and it will hear why
        when it comes back with its pages."""
        self._leasing.expel = expel

    def join(self, client: Client) -> None:
        self._leasing.join(client)

    def leave(self, client: int, *, proof: bool) -> bool:
        """The client's connection is gone; with `proof`, so are its processes. Returns whether proof is still wanted:
        then the caller goes on watching the processes and calls again."""
        return self._leasing.leave(client, proof=proof)

    def close(self) -> None:
        """Gives all memory back. No request may be under way."""
        self._tending.cancel()
        self._leasing.close()
        if self._adopter is not None:
            self._adopter.close()
        self._store.close()
        self._ledger.close()

    async def attach(self, client: Client, message: protocol.Attach) -> tuple[protocol.Granted, list[int]]:
        """The lease, and its locked descriptor, if there is one, that the caller closes."""
        started = self._loop.time()
        try:
            grant = await self._leasing.ask(client, message)
            if message.verify and grant.mode is LeaseMode.RO:
                await self._verify_for(client, message.pool, grant.generation)
        except GmsError as error:
            if self._observer is not None:
                self._observer.refused(error.code)
            raise
        granted, fds = self._grant_lease(client, message.pool, grant.mode, grant.generation)
        seconds = self._loop.time() - started
        if self._observer is not None:
            self._observer.attached(message.pool, grant.mode, seconds)
        new = " (fresh)" if granted.fresh else ""
        detail = (
            f"{client.label} holds {message.pool} {grant.mode}, generation {grant.generation}{new}, epoch "
            f"{message.epoch}, after {seconds * 1e3:.1f} ms"
        )
        self.events.emit("granted", detail, pool=message.pool, client=client.label)
        return granted, fds

    async def allocate(self, client: Client, message: protocol.Allocate) -> tuple[protocol.Pages, list[int]]:
        """The pages and descriptors that the caller closes."""
        lease = self._leasing.get(client, message.pool, LeaseMode.RW)
        size = -(-message.size_bytes // self._backend.granularity) * self._backend.granularity
        entry = self._table.get(message.pool, lease.generation, message.tag)
        if entry is not None and not staged(message.pool):
            if entry.size_bytes == size:
                entry.client = client.id
                return self._shared(entry, 0, writable=True, created=False)
            if entry.filled and entry.client != client.id:  # what an engine of another configuration left
                self._store.discard(entry)
        started = self._loop.time()
        entry = Entry(
            message.pool,
            lease.generation,
            message.tag,
            size,
            min(self._backend.chunk_bytes, size),
            client.label,
            client.id,
        )
        await self._store.allocate(
            entry,
            seconds=message.timeout_seconds,
            around=Surroundings(
                evict=self._leasing.evict,
                lasting_bytes=self._leasing.lasting_bytes,
                wanted=lambda: self._arbiter.lease(client.id, message.pool) == lease,
            ),
        )
        try:
            shared = self._shared(entry, 0, writable=True, created=True)
        except (GmsError, OSError):  # for its client it was never there, and must not be found to exist
            self._store.discard(entry)
            raise
        self._ledger.record(message.pool)
        if self._observer is not None:
            self._observer.allocated(message.pool, size, self._loop.time() - started)
        return shared

    def export(self, client: Client, message: protocol.Export) -> tuple[protocol.Pages, list[int]]:
        lease = self._leasing.get(client, message.pool)
        entry = self._table.get(message.pool, lease.generation, message.tag)
        if entry is None or message.first >= entry.chunks:
            raise GmsError(
                ErrorCode.NOT_FOUND,
                f"Nothing is allocated as {message.tag!r} (chunk {message.first}) in {message.pool}, generation "
                f"{lease.generation}; the lease lists what there is.",
            )
        if lease.mode is LeaseMode.RW:
            entry.client = client.id
        return self._shared(entry, message.first, writable=lease.mode is LeaseMode.RW, created=False)

    def put_manifest(self, client: Client, message: protocol.PutManifest) -> protocol.Done:
        if staged(message.pool):
            raise GmsError(
                ErrorCode.NOT_PERMITTED, f"The manifest of {message.pool} comes with its commit; commit it instead."
            )
        lease = self._leasing.get(client, message.pool, LeaseMode.RW)
        self._table.put_manifest(message.pool, lease.generation, message.manifest)
        self._ledger.record(message.pool)
        return protocol.Done()

    def get_manifest(self, message: protocol.GetManifest) -> protocol.ManifestReply:
        generation = self._arbiter.standing(message.pool)
        entries = self._table.entries(message.pool, generation) if message.digests else ()
        return protocol.ManifestReply(
            generation=generation,
            manifest=self._table.manifest(message.pool, generation),
            allocations=self._table.info(message.pool, generation),
            digests={entry.tag: entry.digests for entry in entries if entry.digests},
            algorithm=self._algorithm_name,
        )

    async def commit(self, client: Client, message: protocol.Commit) -> protocol.Granted:
        lease = self._leasing.get(client, message.pool, LeaseMode.RW)
        if not staged(message.pool):
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{message.pool} is never committed; only weights pools are.")
        entries = [entry for entry in self._table.entries(message.pool, lease.generation) if entry.filled]
        self._ledger.begin_commit(message.pool, lease.generation, message.manifest)
        try:
            for entry in entries:
                await self._store.freeze(entry)
            for entry in entries:
                entry.digests = await self._checker.to_keep(entry, message.manifest, message.digests)
            self._leasing.get(client, message.pool, LeaseMode.RW)
            self._table.put_manifest(message.pool, lease.generation, message.manifest)
            self._leasing.apply(self._arbiter.commit(client.id, message.pool))
            self._ledger.record(message.pool)
        finally:
            self._ledger.end_commit(message.pool)
        detail = f"{client.label} committed {message.pool}, generation {lease.generation}"
        self.events.emit("committed", detail, pool=message.pool, client=client.label)
        granted = self._granted(message.pool, LeaseMode.RO, lease.generation)
        return msgspec.structs.replace(granted, manifest=b"")  # its sender has it

    def release(self, client: Client, message: protocol.Release) -> protocol.Done:
        """Harmless without a lease; `quiesced` counts as proof even then, for pages that a newer epoch left to us."""
        self._leasing.end(client.id, message.pool, proof=message.quiesced)
        detail = f"{client.label} released {message.pool}{' quiesced' if message.quiesced else ''}"
        self.events.emit("released", detail, pool=message.pool, client=client.label, level=logging.DEBUG)
        return protocol.Done()

    async def adopt(
        self, client: Client, message: protocol.Adopt, fds: list[int]
    ) -> tuple[protocol.Done | protocol.Granted, list[int]]:
        """Pages of an earlier life of this service, or of a connection that broke. The caller keeps `fds`."""
        if self._adopter is None:
            raise GmsError(ErrorCode.MISMATCH, "This service keeps no journal and takes nothing back.")
        started = self._loop.time()
        outcome = "refused"
        try:
            self._leasing.inherit(client, message.pool)
            await self._adopter.hand_back(client, message, fds)
            outcome = "taken"
        except GmsError as error:
            detail = f"{client.label} could not hand back {message.pool}: {error}"
            self.events.emit("not_taken", detail, pool=message.pool, client=client.label, level=logging.WARNING)
            raise
        finally:
            if self._observer is not None and not message.more:
                self._observer.handed_back(message.pool, outcome, self._loop.time() - started)
        if message.more:
            return protocol.Done(), []
        lease = self._leasing.get(client, message.pool)
        for entry in self._table.entries(message.pool, lease.generation):
            entry.client, entry.owner = client.id, client.label
        self._ledger.record(message.pool)
        return self._grant_lease(client, message.pool, lease.mode, lease.generation)

    async def verify(self, client: Client, message: protocol.Verify) -> protocol.Verified:
        """A reader's own generation, or what is committed; digests are taken from readers only. Raises GmsError:
        corrupt, after it has withdrawn what does not match; not_found, not_attached."""
        pool = self._arbiter.pools.get(message.pool)
        lease = self._arbiter.lease(client.id, message.pool)
        generation = pool.standing if pool is not None else 0
        if lease is not None and lease.mode is LeaseMode.RO:
            generation = lease.generation
        elif not self._checker.reads:
            raise GmsError(
                ErrorCode.NOT_ATTACHED,
                f"This service cannot read its device: a reader of {message.pool} must verify it; attach first.",
            )
        if pool is None or not staged(message.pool) or pool.awaited or not generation:
            raise GmsError(ErrorCode.NOT_FOUND, f"Nothing is committed to {message.pool} that could be verified.")
        return await self._verify(message.pool, generation, message.digests)

    async def get_events(self, message: protocol.GetEvents) -> protocol.EventsReply:
        events = await self.events.after(message.after, message.timeout_seconds)
        return protocol.EventsReply(events=events, last=events[-1].seq if events else self.events.last)

    def status(self) -> Status:
        return Status(
            device=self.device,
            device_id=self.device_id,
            pools=reporting.pools(self._arbiter, self._table, self._leasing.clients, now=self._loop.time()),
            total_bytes=self._table.total_bytes,
            high_water_bytes=self._table.high_water_bytes,
            memory_limit=self._table.limit_bytes,
            bytes_by_owner=dict(self._table.bytes_by_owner()),
            memory_waits=self._store.waits(),
            clients=len(self._leasing.clients),
            journal=self._ledger.problem,
        )

    def _start_adopter(self, journal: Journal, records: list[PoolRecord], algorithm: str, seconds: float) -> Adopter[P]:
        adopter = Adopter(
            leasing=self._leasing,
            table=self._table,
            store=self._store,
            checker=self._checker,
            journal=journal,
            events=self.events,
            algorithm=algorithm,
            seconds=seconds,
        )
        adopter.restore(records)
        for record in records:
            self._ledger.record(record.pool)
        return adopter

    def _shared(
        self, entry: Entry[P], first: int, *, writable: bool, created: bool
    ) -> tuple[protocol.Pages, list[int]]:
        fds = self._store.share(entry, first, MAX_FDS, writable=writable)
        pages = protocol.Pages(
            tag=entry.tag,
            size_bytes=entry.size_bytes,
            chunk_bytes=entry.chunk_bytes,
            first=first,
            created=created,
            fds=len(fds),
        )
        return pages, fds

    def _grant_lease(
        self, client: Client, pool: str, mode: LeaseMode, generation: int
    ) -> tuple[protocol.Granted, list[int]]:
        if mode is LeaseMode.RW:
            self._table.hand_over(pool, generation, client.label)
        granted = self._granted(pool, mode, generation)
        try:
            fds = self._ledger.open_lease(client.id, pool, generation, processes=client.pidfds)
        except OSError as error:
            self._leasing.end(client.id, pool, proof=False)
            what = f"This service is short of descriptors ({error.strerror}); try again."
            raise GmsError(ErrorCode.BUSY, what, retryable=True) from error
        return msgspec.structs.replace(granted, fds=len(fds)), fds

    def _granted(self, pool: str, mode: LeaseMode, generation: int) -> protocol.Granted:
        allocations = self._table.info(pool, generation)
        return protocol.Granted(
            mode=mode,
            generation=generation,
            fresh=mode is LeaseMode.RW and not allocations,
            manifest=self._table.manifest(pool, generation),
            allocations=allocations,
        )

    async def _verify(self, pool: str, generation: int, digests: Digests) -> protocol.Verified:
        size = 0
        for entry in self._table.entries(pool, generation):
            if (wrong := await self._checker.fault(entry, digests)) is not None:
                if self._arbiter.standing(pool) == generation:
                    self._leasing.condemn(pool, wrong)
                raise GmsError(ErrorCode.CORRUPT, f"{pool} is corrupt: {wrong}. It must be loaded anew.")
            size += entry.size_bytes
        return protocol.Verified(generation=generation, size_bytes=size)

    async def _verify_for(self, client: Client, pool: str, generation: int) -> None:
        """Before a reader gets its lease; it has none if this fails."""
        try:
            if not self._checker.reads:
                raise GmsError(
                    ErrorCode.NOT_PERMITTED,
                    "This service cannot read its device; attach, hash the mapped pages, and send the digests.",
                )
            await self._verify(pool, generation, {})
        except BaseException:
            self._leasing.end(client.id, pool, proof=True)
            raise
