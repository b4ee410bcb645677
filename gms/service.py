"""What the memory service does, apart from sockets: the arbiter decides, the store has the memory, the journal tells
the next service.

Everything here runs on the event loop; what takes long runs on the store's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from gms import adoption, protocol
from gms.adoption import Adopter
from gms.allocations import AllocationTable, Entry
from gms.arbiter import Arbiter, staged
from gms.backends.base import DeviceError, Hash, MemoryBackend
from gms.events import EventLog
from gms.integrity import pieces
from gms.journal import AllocationRecord, Journal, PoolRecord
from gms.leases import Action, Drop, Grant, Held, Pool, Refuse, Request
from gms.protocol import MAX_FDS, ErrorCode, GmsError, LeaseInfo, LeaseMode, PoolStatus, Status
from gms.store import PageStore, fenced

ADOPT_SECONDS: Final = 30.0

P = TypeVar("P")


class Observer(Protocol):
    """What the metrics want to hear about."""

    def attached(self, pool: str, mode: str, seconds: float) -> None: ...
    def refused(self, code: str) -> None: ...
    def allocated(self, pool: str, size_bytes: int, seconds: float) -> None: ...
    def hashed(self, size_bytes: int, seconds: float) -> None: ...
    def handed_back(self, pool: str, outcome: str, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Client:
    """Who is behind a connection, as it introduced itself. `pid` as seen from here, None if in another namespace;
    `process` is equal for connections of one process, None where the kernel cannot tell."""

    id: int
    kind: str
    engine: str
    instance: str
    pid: int | None
    process: tuple[str, int] | None = None

    @property
    def label(self) -> str:
        return f"{self.kind} {self.engine}" + (f" (pid {self.pid})" if self.pid else "")


class MemoryService(Generic[P]):
    """One device's pools. `limit_bytes` bounds what is allocated at a time, None leaves it to the machine; without a
    `journal` nothing outlives the service. `fail` is told, on any thread, of a device that cannot be gone on with."""

    def __init__(
        self,
        backend: MemoryBackend[P],
        *,
        device: str,
        algorithm: Hash,
        journal: Journal | None = None,
        limit_bytes: int | None = None,
        adopt_seconds: float = ADOPT_SECONDS,
        observer: Observer | None = None,
        fail: Callable[[DeviceError], None],
    ) -> None:
        self.device = device
        self.device_id = backend.device_id
        self.events = EventLog()
        self._backend = backend
        self._observer = observer
        self._journal = journal
        self._journal_problem = "" if journal is not None else "this service keeps no journal"
        self._table: AllocationTable[P] = AllocationTable(limit_bytes)
        self._store = PageStore(backend, self._table, self.events, algorithm=algorithm, fail=fail)
        self._clients: dict[int, Client] = {}
        self._keys = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._lease_files: dict[tuple[int, str], Path] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        records = journal.load() if journal is not None else []
        self._arbiter = Arbiter(after=max((record.highest_generation for record in records), default=0))
        self._adopter = None if journal is None else self._start_adopter(journal, records, adopt_seconds)

    def join(self, client: Client) -> None:
        self._clients[client.id] = client

    def leave(self, client: int, *, proof: bool) -> bool:
        """The client's connection is gone; with `proof`, so are its processes. Returns whether proof is still wanted:
        then the caller goes on watching the processes and calls again."""
        for name in list(self._arbiter.pools):
            self._end_lease(client, name, proof)
        wanted = self._arbiter.suspected(client)
        if not wanted:
            self._clients.pop(client, None)
        return wanted

    def close(self) -> None:
        """Gives all memory back. No request may be under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._adopter is not None:
            self._adopter.close()
        self._store.close()
        if self._journal is not None:
            self._journal.close()

    async def attach(self, client: Client, message: protocol.Attach) -> tuple[protocol.Granted, list[int]]:
        """The lease, and its locked descriptor, if there is one, that the caller closes."""
        started = self._loop.time()
        deadline = started + message.timeout_seconds
        key = next(self._keys)
        request = Request(key, client.id, client.label, message.pool, message.mode, message.epoch, deadline)
        answer: asyncio.Future[Grant] = self._loop.create_future()
        self._waiting[key] = answer
        try:
            self._inherit(client, message.pool)
            self._apply(self._arbiter.attach(request))
            self._persist(message.pool)
            if not answer.done():
                detail = self._wait_sentence(self._arbiter.pools[message.pool], request)
                self.events.emit("waiting", detail, pool=message.pool, client=client.label)
            grant = await answer
            if message.verify and grant.mode is LeaseMode.RO:
                await self._verify_for(client, message.pool)
        except GmsError as error:
            if self._observer is not None:
                self._observer.refused(error.code)
            raise
        finally:
            self._waiting.pop(key, None)
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
        lease = self._lease(client, message.pool, LeaseMode.RW)
        size = -(-message.size_bytes // self._backend.granularity) * self._backend.granularity
        entry = self._table.get(message.pool, lease.generation, message.tag)
        if entry is not None and not staged(message.pool):
            if entry.size_bytes == size:
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
        await self._store.allocate(entry, seconds=message.timeout_seconds, evict=self._evict)
        self._persist(message.pool)
        if self._observer is not None:
            self._observer.allocated(message.pool, size, self._loop.time() - started)
        return self._shared(entry, 0, writable=True, created=True)

    def export(self, client: Client, message: protocol.Export) -> tuple[protocol.Pages, list[int]]:
        lease = self._lease(client, message.pool)
        entry = self._table.get(message.pool, lease.generation, message.tag)
        if entry is None or message.first >= len(entry.pages):
            raise GmsError(
                ErrorCode.NOT_FOUND,
                f"Nothing is allocated as {message.tag!r} (chunk {message.first}) in {message.pool}, generation "
                f"{lease.generation}; the lease lists what there is.",
            )
        return self._shared(entry, message.first, writable=lease.mode is LeaseMode.RW, created=False)

    def put_manifest(self, client: Client, message: protocol.PutManifest) -> protocol.Done:
        if staged(message.pool):
            raise GmsError(
                ErrorCode.NOT_PERMITTED, f"The manifest of {message.pool} comes with its commit; commit it instead."
            )
        lease = self._lease(client, message.pool, LeaseMode.RW)
        self._table.put_manifest(message.pool, lease.generation, message.manifest)
        self._persist(message.pool)
        return protocol.Done()

    def get_manifest(self, message: protocol.GetManifest) -> protocol.ManifestReply:
        pool = self._arbiter.pools.get(message.pool)
        generation = pool.standing if pool is not None else 0
        return protocol.ManifestReply(
            generation=generation,
            manifest=self._table.manifest(message.pool, generation),
            allocations=self._table.info(message.pool, generation),
        )

    async def commit(self, client: Client, message: protocol.Commit) -> protocol.Granted:
        lease = self._lease(client, message.pool, LeaseMode.RW)
        if not staged(message.pool):
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{message.pool} is never committed; only weights pools are.")
        entries = [entry for entry in self._table.entries(message.pool, lease.generation) if entry.filled]
        for entry in entries:
            await self._store.freeze(entry)
        for entry in entries:
            entry.digests = await self._digests_to_keep(entry, message)
        self._lease(client, message.pool, LeaseMode.RW)
        self._table.put_manifest(message.pool, lease.generation, message.manifest)
        self._apply(self._arbiter.commit(client.id, message.pool))
        self._persist(message.pool)
        detail = f"{client.label} committed {message.pool}, generation {lease.generation}"
        self.events.emit("committed", detail, pool=message.pool, client=client.label)
        granted = self._granted(message.pool, LeaseMode.RO, lease.generation)
        return msgspec.structs.replace(granted, manifest=b"")  # its sender has it

    def release(self, client: Client, message: protocol.Release) -> protocol.Done:
        """Harmless without a lease; `quiesced` counts as proof even then, for pages that a newer epoch left to us."""
        self._end_lease(client.id, message.pool, message.quiesced)
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
            self._inherit(client, message.pool)
            await self._adopter.hand_back(client.id, client.label, message, fds)
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
        lease = self._lease(client, message.pool)
        self._persist(message.pool)
        return self._grant_lease(client, message.pool, lease.mode, lease.generation)

    async def verify(self, message: protocol.Verify) -> protocol.Verified:
        """Raises GmsError(corrupt), and withdraws what does not match."""
        pool = self._arbiter.pools.get(message.pool)
        if pool is None or not staged(message.pool) or pool.adopting or not pool.standing:
            raise GmsError(ErrorCode.NOT_FOUND, f"Nothing is committed to {message.pool} that could be verified.")
        generation = pool.standing
        for entry in self._table.entries(message.pool, generation):
            if self._backend.readable:
                wrong = await self._mismatch(entry)
            else:
                wrong = self._compare_word(entry, message)
            if wrong is not None:
                if self._table.holds(entry) and pool.standing == generation:
                    self._condemn(message.pool, wrong)
                raise GmsError(ErrorCode.CORRUPT, f"{message.pool} is corrupt: {wrong}. It must be loaded anew.")
        return protocol.Verified(generation=generation, size_bytes=self._table.bytes_of(message.pool, generation))

    async def get_events(self, message: protocol.GetEvents) -> protocol.EventsReply:
        events = await self.events.after(message.after, message.timeout_seconds)
        return protocol.EventsReply(events=events, last=events[-1].seq if events else self.events.last)

    def status(self) -> Status:
        pools = []
        for name, pool in self._arbiter.pools.items():
            leases = []
            for held in pool.held():
                who = self._clients[held.client]
                leases.append(LeaseInfo(who.engine, who.instance, who.pid, held.mode))
            pools.append(
                PoolStatus(
                    name=name,
                    state=pool.state,
                    generation=pool.current,
                    epoch=max(pool.epoch, 0),
                    bytes=self._table.bytes_in(name),
                    high_water_bytes=self._table.high_water_in(name),
                    orphaned_bytes=sum(self._table.bytes_of(name, generation) for generation in pool.orphans()),
                    waiting=len(pool.waiting()),
                    waits=[self._wait_sentence(pool, request) for request in pool.waiting()],
                    leases=leases,
                    allocations=self._table.info(name, pool.current),
                    corrupt=pool.corrupt,
                )
            )
        return Status(
            device=self.device,
            device_id=self.device_id,
            pools=pools,
            total_bytes=self._table.total_bytes,
            high_water_bytes=self._table.high_water_bytes,
            memory_limit=self._table.limit_bytes,
            bytes_by_owner=dict(self._table.bytes_by_owner()),
            memory_waits=self._store.waits(),
            clients=len(self._clients),
            journal=self._journal_problem,
        )

    def _start_adopter(self, journal: Journal, records: list[PoolRecord], seconds: float) -> Adopter[P]:
        adopter = Adopter(
            arbiter=self._arbiter,
            table=self._table,
            store=self._store,
            journal=journal,
            events=self.events,
            apply=self._apply,
            condemn=self._condemn,
            seconds=seconds,
        )
        adopter.restore(records)
        for record in records:
            self._persist(record.pool)
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
        if self._journal is None:
            return granted, []
        try:
            descriptor, path = self._journal.open_lease(pool, generation)
        except OSError as error:
            self._journal_failed(error)
            return granted, []
        self._close_lease_file(client.id, pool)
        self._lease_files[client.id, pool] = path
        return msgspec.structs.replace(granted, fds=1), [descriptor]

    def _granted(self, pool: str, mode: LeaseMode, generation: int) -> protocol.Granted:
        allocations = self._table.info(pool, generation)
        return protocol.Granted(
            mode=mode,
            generation=generation,
            fresh=mode is LeaseMode.RW and not allocations,
            manifest=self._table.manifest(pool, generation),
            allocations=allocations,
        )

    def _lease(self, client: Client, pool: str, mode: LeaseMode | None = None) -> Held:
        lease = self._arbiter.lease(client.id, pool)
        if lease is None:
            if self._arbiter.fenced(client.id, pool):
                raise fenced(pool)
            raise GmsError(ErrorCode.NOT_ATTACHED, f"This connection has no lease on {pool}; attach to it first.")
        if mode is not None and lease.mode is not mode:
            raise GmsError(
                ErrorCode.NOT_PERMITTED,
                f"The lease on {pool} is {lease.mode}, this needs {mode}; attach as a writer.",
            )
        return lease

    def _end_lease(self, client: int, pool: str, proof: bool) -> None:
        """Where there are no pages there is nothing to be proved."""
        lease = self._arbiter.lease(client, pool)
        if lease is not None and not self._arbiter.fenced(client, pool):
            proof = proof or not self._table.entries(pool, lease.generation)
        self._apply(self._arbiter.release(client, pool, proof))
        if proof or not self._arbiter.suspected(client):
            self._close_lease_file(client, pool)

    def _close_lease_file(self, client: int, pool: str) -> None:
        path = self._lease_files.pop((client, pool), None)
        if path is not None and self._journal is not None:
            self._journal.close_lease(path)

    def _inherit(self, client: Client, pool: str) -> None:
        """A process that comes back on a new connection may have what its broken one held, without dying first."""
        if client.process is not None:
            others = frozenset(c.id for c in self._clients.values() if c.process == client.process and c is not client)
            if others:
                self._arbiter.inherit(pool, others, client.id)

    async def _digests_to_keep(self, entry: Entry[P], message: protocol.Commit) -> list[bytes]:
        if self._backend.readable:
            return await self._hashed(entry, message.manifest)
        given = message.digests.get(entry.tag, [])
        wanted = len(pieces(entry.size_bytes, entry.chunk_bytes, message.manifest, entry.tag))
        if len(given) != wanted:
            raise GmsError(
                ErrorCode.INVALID,
                f"{message.pool} was not committed: {wanted} digests of {entry.tag!r} are due, {len(given)} came. This "
                "service cannot read its device; the writer must hash what it wrote.",
            )
        return given

    async def _hashed(self, entry: Entry[P], manifest: bytes) -> list[bytes]:
        started = self._loop.time()
        digests = await self._store.digests(entry, manifest)
        if self._observer is not None:
            self._observer.hashed(entry.size_bytes, self._loop.time() - started)
        return digests

    async def _mismatch(self, entry: Entry[P]) -> str | None:
        manifest = self._table.manifest(entry.pool, entry.generation)
        return adoption.compare(entry, await self._hashed(entry, manifest), manifest)

    def _compare_word(self, entry: Entry[P], message: protocol.Verify) -> str | None:
        if entry.tag not in message.digests:
            raise GmsError(
                ErrorCode.INVALID,
                f"This service cannot read its device: a reader must send its digests of {entry.tag!r}.",
            )
        manifest = self._table.manifest(entry.pool, entry.generation)
        return adoption.compare(entry, message.digests[entry.tag], manifest)

    async def _verify_for(self, client: Client, pool: str) -> None:
        """Before a reader gets its lease; it has none if this fails."""
        try:
            if not self._backend.readable:
                raise GmsError(
                    ErrorCode.NOT_PERMITTED,
                    "This service cannot read its device; attach, hash what is mapped, and send the digests.",
                )
            await self.verify(protocol.Verify(pool=pool))
        except BaseException:
            self._end_lease(client.id, pool, True)
            raise

    def _condemn(self, pool: str, reason: str) -> None:
        detail = f"{pool} is given to nobody any more: {reason}"
        self.events.emit("corrupt", detail, pool=pool, level=logging.ERROR)
        self._apply(self._arbiter.condemn(pool, reason))
        self._persist(pool)

    def _evict(self) -> bool:
        """Makes room by giving up weights that nobody uses."""
        actions = self._arbiter.evict()
        for action in actions:
            if isinstance(action, Drop):
                detail = f"{action.pool} is given up: nobody uses it and memory is short"
                self.events.emit("evicted", detail, pool=action.pool)
        self._apply(actions)
        return bool(actions)

    def _wait_sentence(self, pool: Pool, request: Request) -> str:
        suspects = (self._clients[client].label for client in pool.suspects() if client in self._clients)
        holders = (self._clients[held.client].label for held in pool.held() if held.mode is LeaseMode.RW)
        whom = ", ".join(dict.fromkeys([*holders, *suspects]))
        left = max(request.deadline - self._loop.time(), 0.0)
        epoch = f", epoch {request.epoch}," if not staged(request.pool) else ""
        return (
            f"{request.label}{epoch} waits for {request.pool} as {request.mode}, because {pool.cause()}"
            f"{f' ({whom})' if whom else ''}; {left:.1f} s left"
        )

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant():
                    if (answer := self._answer(action.request)) is not None:
                        answer.set_result(action)
                case Refuse():
                    error = GmsError(action.code, action.message, retryable=action.retryable)
                    if (answer := self._answer(action.request)) is not None:
                        answer.set_exception(error)
                case Drop():
                    count = self._store.drop(action.pool, action.generation)
                    detail = f"{action.pool}: generation {action.generation} is given back, {count} allocations"
                    self.events.emit("dropped", detail, pool=action.pool)
        for pool in {action.pool if isinstance(action, Drop) else action.request.pool for action in actions}:
            self._persist(pool)
        self._arm()

    def _answer(self, request: Request) -> asyncio.Future[Grant] | None:
        """The future of a request. A session that was just cancelled has taken its own away, and its lease, if this
        grants one, goes with it in a moment: the answer is for nobody then."""
        answer = self._waiting.get(request.key)
        return None if answer is None or answer.done() else answer

    def _arm(self) -> None:
        """One timer, for the next deadline of any waiting request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._arbiter.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, lambda: self._apply(self._arbiter.expire(self._loop.time())))

    def _persist(self, name: str) -> None:
        """Writes down what a next service must know of a pool. A journal that cannot be written stops nothing: it is
        told in the status, and what is lost is the hand-back."""
        if self._journal is None:
            return
        pool = self._arbiter.pools.get(name)
        try:
            if pool is None or (staged(name) and not pool.standing):
                self._journal.forget(name)
            else:
                self._journal.save(self._record(name, pool))
        except OSError as error:
            self._journal_failed(error)
        else:
            self._journal_problem = ""

    def _journal_failed(self, error: OSError) -> None:
        if not self._journal_problem:
            detail = f"The journal cannot be written ({error}): pages could not be taken back after a restart."
            self.events.emit("journal", detail, level=logging.ERROR)
        self._journal_problem = str(error)

    def _record(self, name: str, pool: Pool) -> PoolRecord:
        entries = self._table.entries(name, pool.standing)
        return PoolRecord(
            device_id=self.device_id,
            pool=name,
            generation=pool.standing,
            highest_generation=max((p.current for p in self._arbiter.pools.values()), default=0),
            fence=pool.epoch,
            lease_epoch=pool.lease_epoch,
            manifest=self._table.manifest(name, pool.standing),
            allocations=[
                AllocationRecord(
                    tag=entry.tag,
                    size_bytes=entry.size_bytes,
                    chunk_bytes=entry.chunk_bytes,
                    owner=entry.owner,
                    identities=list(entry.identities),
                    digests=entry.digests,
                )
                for entry in entries
                if len(entry.identities) == len(entry.pages)
            ],
        )
