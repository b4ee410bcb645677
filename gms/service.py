"""What the memory service does, apart from sockets: the arbiter decides, the table counts, the backend has the memory.

Everything here runs on the event loop but the backend's slow calls, which run one after the other on one memory
thread. That order is what makes it safe to destroy pages while a call on them is still under way: the destruction
queues up behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from gms import protocol
from gms.allocations import AllocationTable, Entry
from gms.arbiter import Arbiter
from gms.backends.base import MemoryBackend, OutOfMemoryError, StillMappedError
from gms.leases import Action, Drop, Grant, Held, Refuse, Request
from gms.protocol import ErrorCode, GmsError, LeaseInfo, LeaseMode, PoolStatus, Status

log: Final = logging.getLogger("gms")

P = TypeVar("P")


class Observer(Protocol):
    """What the metrics want to hear about."""

    def attached(self, pool: str, mode: str, seconds: float) -> None: ...
    def refused(self, code: str) -> None: ...
    def allocated(self, pool: str, size_bytes: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Client:
    """Who is behind a connection, as it introduced itself. `pid` as seen from here, None if in another namespace."""

    id: int
    kind: str
    engine: str
    instance: str
    pid: int | None

    @property
    def label(self) -> str:
        return f"{self.kind} {self.engine}" + (f" (pid {self.pid})" if self.pid else "")


class MemoryService(Generic[P]):
    """One device's pools. `limit_bytes` bounds what is allocated at a time, None leaves it to the machine."""

    def __init__(
        self,
        backend: MemoryBackend[P],
        *,
        device: str,
        limit_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.device = device
        self._backend = backend
        self._observer = observer
        self._table: AllocationTable[P] = AllocationTable(limit_bytes)
        self._arbiter = Arbiter()
        self._clients: dict[int, Client] = {}
        self._keys = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._memory = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gms-memory")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

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
        for name, generation in self._table.generations():
            self._destroy(self._table.drop(name, generation))
        self._memory.shutdown(wait=True)

    async def attach(self, client: Client, message: protocol.Attach) -> protocol.Granted:
        started = self._loop.time()
        request = Request(
            next(self._keys),
            client.id,
            client.label,
            message.pool,
            message.mode,
            message.epoch,
            started + message.timeout_seconds,
        )
        answer: asyncio.Future[Grant] = self._loop.create_future()
        self._waiting[request.key] = answer
        try:
            self._apply(self._arbiter.attach(request))
            grant = await answer
        except GmsError as error:
            if self._observer is not None:
                self._observer.refused(error.code)
            raise
        finally:
            self._waiting.pop(request.key, None)
        if grant.mode is LeaseMode.RW:
            self._table.hand_over(message.pool, grant.generation, client.label)
        granted = self._granted(message.pool, grant.mode, grant.generation)
        seconds = self._loop.time() - started
        if self._observer is not None:
            self._observer.attached(message.pool, grant.mode, seconds)
        new = " (fresh)" if granted.fresh else ""
        log.info(
            "%s holds %s %s, generation %d%s, epoch %d, after %.1f ms",
            *(client.label, message.pool, grant.mode, grant.generation, new, message.epoch, seconds * 1e3),
        )
        return granted

    async def allocate(self, client: Client, message: protocol.Allocate) -> tuple[protocol.Pages, int]:
        """The pages and a descriptor that the caller closes."""
        lease = self._lease(client, message.pool, LeaseMode.RW)
        size = -(-message.size_bytes // self._backend.granularity) * self._backend.granularity
        entry = self._table.get(message.pool, lease.generation, message.tag)
        reuse = message.pool in ("kv", "kv_index") and entry is not None and entry.size_bytes == size
        if entry is None or not reuse:
            started = self._loop.time()
            entry = self._table.reserve(message.pool, lease.generation, message.tag, size, client.label)
            await self._fill(entry)
            if self._observer is not None:
                self._observer.allocated(message.pool, size, self._loop.time() - started)
        return self._shared(entry, writable=True, created=not reuse)

    def export(self, client: Client, message: protocol.Export) -> tuple[protocol.Pages, int]:
        lease = self._lease(client, message.pool)
        entry = self._table.get(message.pool, lease.generation, message.tag)
        if entry is None:
            raise GmsError(
                ErrorCode.NOT_FOUND,
                f"Nothing is allocated as {message.tag!r} in {message.pool}, generation {lease.generation}; "
                "the lease lists what there is.",
            )
        return self._shared(entry, writable=lease.mode is LeaseMode.RW, created=False)

    async def commit(self, client: Client, message: protocol.Commit) -> protocol.Granted:
        lease = self._lease(client, message.pool, LeaseMode.RW)
        if not message.pool.startswith("weights/"):
            raise GmsError(ErrorCode.NOT_PERMITTED, f"{message.pool} is never committed; only weights pools are.")
        for entry in self._table.entries(message.pool, lease.generation):
            if entry.pages is None:
                continue
            try:
                await self._in_memory_thread(self._backend.freeze, entry.pages)
            except StillMappedError as error:
                raise GmsError(
                    ErrorCode.STILL_MAPPED,
                    f"{message.pool} was not committed: {entry.tag!r} still has a writable mapping; unmap it (in "
                    "forked children too) and commit again.",
                    retryable=True,
                ) from error
        self._table.put_manifest(message.pool, lease.generation, message.manifest)
        self._apply(self._arbiter.commit(client.id, message.pool))
        log.info("%s committed %s, generation %d", client.label, message.pool, lease.generation)
        granted = self._granted(message.pool, LeaseMode.RO, lease.generation)
        return msgspec.structs.replace(granted, manifest=b"")  # its sender has it

    def release(self, client: Client, message: protocol.Release) -> protocol.Done:
        """Harmless without a lease; `quiesced` counts as proof even then, for pages that a newer epoch left to us."""
        self._end_lease(client.id, message.pool, message.quiesced)
        return protocol.Done()

    def status(self) -> Status:
        by_pool = self._table.bytes_by_pool()
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
                    bytes=by_pool[name],
                    orphaned_bytes=sum(self._table.bytes_of(name, generation) for generation in pool.orphans()),
                    waiting=len(pool.waiting()),
                    leases=leases,
                    allocations=self._table.info(name, pool.current),
                )
            )
        return Status(
            device=self.device,
            pools=pools,
            total_bytes=self._table.total_bytes,
            memory_limit=self._table.limit_bytes,
            bytes_by_owner=dict(self._table.bytes_by_owner()),
            clients=len(self._clients),
        )

    async def _fill(self, entry: Entry[P]) -> None:
        """Creates and populates the entry's pages, or leaves nothing of it."""
        try:
            creation = self._memory.submit(self._backend.create, entry.tag, entry.size_bytes)
            try:
                pages = await asyncio.wrap_future(creation)
            except asyncio.CancelledError:
                creation.add_done_callback(self._destroy_result)
                raise
            try:
                for offset in range(0, entry.size_bytes, self._backend.slice_bytes):
                    part = min(self._backend.slice_bytes, entry.size_bytes - offset)
                    await self._in_memory_thread(self._backend.populate, pages, offset, part)
                if not self._table.holds(entry):  # the pool went to a newer epoch meanwhile
                    raise _fenced(entry.pool)
            except BaseException:
                self._memory.submit(self._backend.destroy, pages)
                raise
            entry.pages = pages
        except BaseException as error:
            self._table.cancel(entry)
            if isinstance(error, OutOfMemoryError):
                raise GmsError(
                    ErrorCode.OUT_OF_MEMORY,
                    f"The machine has no room for {entry.size_bytes} bytes as {entry.tag!r} in {entry.pool} ({error}); "
                    f"this service holds {self._table.total_bytes}. Free memory, or allow the service more.",
                    retryable=True,
                ) from error
            raise

    async def _in_memory_thread(self, call: Callable[..., None], *arguments: object) -> None:
        await asyncio.wrap_future(self._memory.submit(call, *arguments))

    def _shared(self, entry: Entry[P], *, writable: bool, created: bool) -> tuple[protocol.Pages, int]:
        if entry.pages is None:
            raise GmsError(
                ErrorCode.NOT_FOUND,
                f"{entry.tag!r} in {entry.pool} is still being filled; ask again.",
                retryable=True,
            )
        fd = self._backend.share(entry.pages, writable=writable)
        return protocol.Pages(tag=entry.tag, size_bytes=entry.size_bytes, created=created, fds=1), fd

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
                raise _fenced(pool)
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
                    dropped = self._table.drop(action.pool, action.generation)
                    log.info(
                        "%s: generation %d is given back, %d allocations",
                        action.pool,
                        action.generation,
                        len(dropped),
                    )
                    self._destroy(dropped)
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

    def _destroy(self, entries: list[Entry[P]]) -> None:
        for entry in entries:
            if entry.pages is not None:
                self._memory.submit(self._backend.destroy, entry.pages)

    def _destroy_result(self, creation: ThreadFuture[P]) -> None:
        if not creation.cancelled() and creation.exception() is None:
            self._backend.destroy(creation.result())


def _fenced(pool: str) -> GmsError:
    message = f"A newer epoch took {pool} over; this engine must stop serving and touch its pages no more."
    return GmsError(ErrorCode.FENCED, message)
