"""The lives of leases: asked for, waited for, granted, ended. The arbiter decides; here its decisions are carried out.

On the event loop. Whoever changes something tells the ledger, so that the next service knows it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from gms import protocol, reporting
from gms.allocations import AllocationTable
from gms.arbiter import Arbiter, staged
from gms.clients import Client
from gms.events import EventLog
from gms.leases import Action, Drop, Grant, Held, Refuse, Request, fenced
from gms.ledger import Ledger
from gms.protocol import ErrorCode, GmsError, LeaseMode
from gms.store import PageStore

P = TypeVar("P")


class Leasing(Generic[P]):
    """All leases of one service, and the clients that have or want them."""

    def __init__(
        self,
        *,
        arbiter: Arbiter,
        table: AllocationTable[P],
        store: PageStore[P],
        ledger: Ledger[P],
        events: EventLog,
    ) -> None:
        self.arbiter = arbiter
        self._table = table
        self._store = store
        self._ledger = ledger
        self._events = events
        self.expel: Callable[[int], None] = lambda client: None
        """Ends a client's connection; the server's to give."""
        self._clients: dict[int, Client] = {}
        self._keys = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def clients(self) -> Mapping[int, Client]:
        return self._clients

    def join(self, client: Client) -> None:
        self._clients[client.id] = client

    def leave(self, client: int, *, proof: bool) -> bool:
        """See `gms.service.MemoryService.leave`."""
        for name in list(self.arbiter.pools):
            self.end(client, name, proof=proof)
        wanted = self.arbiter.suspected(client)
        if not wanted:
            self._clients.pop(client, None)
            self._ledger.close_leases(client)
        return wanted

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def ask(self, client: Client, message: protocol.Attach) -> Grant:
        """Waits for a lease. If this is cancelled, a lease that was granted meanwhile ends with its client."""
        now = self._loop.time()
        key = next(self._keys)
        deadline = now + message.timeout_seconds
        request = Request(key, client.id, client.label, message.pool, message.mode, message.epoch, deadline)
        answer: asyncio.Future[Grant] = self._loop.create_future()
        self._waiting[key] = answer
        try:
            self.inherit(client, message.pool)
            self.apply(self.arbiter.attach(request))
            self._ledger.record(message.pool)
            if not answer.done():
                detail = reporting.wait(self.arbiter.pools[message.pool], request, self._clients, now=now)
                self._events.emit("waiting", detail, pool=message.pool, client=client.label)
            return await answer
        finally:
            self._waiting.pop(key, None)

    def get(self, client: Client, pool: str, mode: LeaseMode | None = None) -> Held:
        """The client's lease. Raises GmsError: not_attached, fenced, not_permitted if it is not of `mode`."""
        lease = self.arbiter.lease(client.id, pool)
        if lease is None:
            if self.arbiter.fenced(client.id, pool):
                raise fenced(pool)
            raise GmsError(ErrorCode.NOT_ATTACHED, f"This connection has no lease on {pool}; attach to it first.")
        if mode is not None and lease.mode is not mode:
            raise GmsError(
                ErrorCode.NOT_PERMITTED,
                f"The lease on {pool} is {lease.mode}, this needs {mode}; attach as a writer.",
            )
        return lease

    def end(self, client: int, pool: str, *, proof: bool) -> None:
        """Where there are no pages, of this lease or of earlier ones, there is nothing to be proved."""
        lease = self.arbiter.lease(client, pool)
        if lease is not None and not self.arbiter.suspected(client, pool):
            proof = proof or not self._table.entries(pool, lease.generation)
        self.apply(self.arbiter.release(client, pool, proof))
        if lease is not None and staged(pool):
            self._charge_readers(pool, lease.generation)
        if proof or not self.arbiter.suspected(client, pool):
            self._ledger.close_lease(client, pool)

    def _charge_readers(self, pool: str, generation: int) -> None:
        """Pages count for one of those who read them, not for a writer that may be long gone."""
        found = self.arbiter.pools.get(pool)
        held = found.held() if found is not None else ()
        reader = next((lease.client for lease in held if lease.generation == generation), None)
        if reader is not None and reader in self._clients:
            self._table.hand_over(pool, generation, self._clients[reader].label)

    def inherit(self, client: Client, pool: str) -> None:
        """A process that comes back on a new connection, with all its ranks, may have what its broken one held without
        dying first."""
        others = frozenset(
            other.id
            for other in self._clients.values()
            if other is not client and other.processes and other.processes <= client.processes
        )
        if others:
            self.arbiter.inherit(pool, others, client.id)

    def renew(self, client: int, pool: str) -> None:
        """The lease's file is gone: its client is to come back with its pages for another one. Whoever still writes
        what nobody has committed would lose it, and keeps its lease as it is."""
        lease = self.arbiter.lease(client, pool)
        if lease is not None and not (staged(pool) and lease.mode is LeaseMode.RW):
            detail = f"{self._clients[client].label} is to hand {pool} back: its lease file was removed"
            self._events.emit("renewed", detail, pool=pool, client=self._clients[client].label)
            self.expel(client)

    def condemn(self, pool: str, reason: str) -> None:
        """What is committed there is not what was written: nobody gets it any more, and who reads it must stop."""
        detail = f"{pool} is given to nobody any more: {reason}"
        self._events.emit("corrupt", detail, pool=pool, level=logging.ERROR)
        generation = self.arbiter.standing(pool)
        readers = [held.client for held in self.arbiter.pools[pool].held() if held.generation == generation]
        self.apply(self.arbiter.condemn(pool, reason))
        self._ledger.record(pool)
        for reader in readers:
            self.expel(reader)

    def lasting_bytes(self) -> int:
        """How much memory does not go by itself. What is being filled may fail, and does not count."""
        entries = (entry for generation in self.arbiter.lasting() for entry in self._table.entries(*generation))
        return sum(entry.size_bytes for entry in entries if entry.filled)

    def evict(self, missing_bytes: int) -> bool:
        """Makes room by giving up the oldest weights that nobody uses. False, and all stay, if that much would not come
        free even with all of them gone."""
        if sum(self._table.bytes_of(*generation) for generation in self.arbiter.unused()) < missing_bytes:
            return False
        actions = self.arbiter.evict()
        for action in actions:
            if isinstance(action, Drop):
                detail = f"{action.pool} is given up: nobody uses it and memory is short"
                self._events.emit("evicted", detail, pool=action.pool)
        self.apply(actions)
        return bool(actions)

    def apply(self, actions: list[Action]) -> None:
        """Carries out what the arbiter decided."""
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
                    self._events.emit("dropped", detail, pool=action.pool)
        for pool in {action.pool if isinstance(action, Drop) else action.request.pool for action in actions}:
            self._ledger.record(pool)
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
        deadline = self.arbiter.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        awaited = self.arbiter.awaited()
        self.apply(self.arbiter.expire(self._loop.time()))
        for pool, generation in awaited:
            if (pool, generation) not in self.arbiter.awaited():
                detail = f"{pool}: generation {generation} was not handed back before a newer epoch needed the pool"
                self._events.emit("given_up", detail, pool=pool, level=logging.WARNING)
