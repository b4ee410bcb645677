"""Who may read or write a pool. Pure: clients are numbers, time is passed in, decisions come back as actions.

Two kinds of pool (docs/adr/0003):

* `weights/<layout key>` is **staged**. One writer at a time fills a new generation; readers go on with the committed
  one, which is replaced only by a commit. A writer that leaves before it leaves nothing.
* `kv` and `kv_index` are **fenced by epoch**. One holder at a time; the pages stay when it goes. A newer epoch gets
  them as soon as the old holder's end is *proved*: all its pidfds readable, or released quiesced. Without proof in time the
  newer epoch gets a new, empty generation, and the old one is an orphan until its holder is known to be gone.

A client may lose its lease without being gone: its connection closed, but its process lives and may still have pages
mapped. So every end of a lease states whether it is proof (`leave(..., proof)`), and a generation is dropped, its
memory given back, only when nobody can have it mapped for writing any more. States are derived, never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from gms.protocol import ErrorCode, LeaseMode

MAX_POOLS: Final = 64


class PoolState(StrEnum):
    EMPTY = "EMPTY"
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    """Pages stand, nobody is attached. In the kv pools too: the last holder is gone, the next one takes them over."""
    READ = "READ"


@dataclass(frozen=True, slots=True)
class Request:
    """A wish for a lease. `key` names this request in the answer, `label` its client in sentences for people."""

    key: int
    client: int
    label: str
    pool: str
    mode: LeaseMode
    epoch: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Grant:
    request: Request
    mode: LeaseMode
    generation: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    request: Request
    code: ErrorCode
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Give this generation's memory back."""

    pool: str
    generation: int


Action = Grant | Refuse | Drop


@dataclass(frozen=True, slots=True)
class Held:
    """A live lease."""

    client: int
    mode: LeaseMode
    generation: int


class Pool(Protocol):
    """What both kinds of pool can do. Each method that changes something returns what follows from it."""

    @property
    def state(self) -> PoolState: ...
    @property
    def current(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def request(self, request: Request) -> list[Action]: ...
    def leave(self, client: int, proof: bool) -> list[Action]: ...
    def commit(self, client: int) -> list[Action]: ...
    def expire(self, now: float) -> list[Action]: ...
    def held(self) -> Iterator[Held]: ...
    def waiting(self) -> list[Request]: ...
    def suspects(self) -> Iterator[int]:
        """Clients whose end is to be proved."""
        ...

    def orphans(self) -> Iterator[int]:
        """Generations that only wait for such a proof."""
        ...

    def fenced(self, client: int) -> bool: ...


class StagedPool:
    """Weights: one writer, committed generations, many readers."""

    epoch: Final = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._committed = 0
        self._last = 0
        self._writer: Held | None = None
        self._readers: dict[int, int] = {}
        self._queue: list[Request] = []
        self._aborted: dict[int, int] = {}  # generation -> the living client that may still have it mapped

    @property
    def state(self) -> PoolState:
        if self._writer is not None:
            return PoolState.WRITING
        if self._committed:
            return PoolState.READ if self._readers else PoolState.COMMITTED
        return PoolState.EMPTY

    @property
    def current(self) -> int:
        """The committed generation, or the one being written if there is none; 0 for neither."""
        return self._committed or (self._writer.generation if self._writer else 0)

    @property
    def idle(self) -> bool:
        return not (self.current or self._queue or self._aborted)

    def request(self, request: Request) -> list[Action]:
        if any(held.client == request.client for held in self.held()):
            return [_already(request)]
        self._queue.append(request)
        return self._grant()

    def leave(self, client: int, proof: bool) -> list[Action]:
        actions: list[Action] = []
        self._queue = [request for request in self._queue if request.client != client]
        if self._writer is not None and self._writer.client == client:
            self._aborted[self._writer.generation] = client
            self._writer = None
        if client in self._readers:
            actions += self._forget_reader(client)
        if proof:
            for generation in [g for g, owner in self._aborted.items() if owner == client]:
                del self._aborted[generation]
                actions.append(Drop(self.name, generation))
        return actions + self._grant()

    def commit(self, client: int) -> list[Action]:
        """The writer's generation becomes the committed one and its lease a read lease. The caller checks the lease."""
        if self._writer is None or self._writer.client != client:
            raise ValueError(f"client {client} does not write {self.name}")
        replaced, self._committed, self._writer = self._committed, self._writer.generation, None
        unread = replaced and replaced not in self._readers.values()
        self._readers[client] = self._committed
        return ([Drop(self.name, replaced)] if unread else []) + self._grant()

    def expire(self, now: float) -> list[Action]:
        late = [request for request in self._queue if request.deadline <= now]
        self._queue = [request for request in self._queue if request.deadline > now]
        reason = "another client is still writing it" if self._writer else "nobody has committed anything to it"
        return [
            Refuse(
                r,
                ErrorCode.TIMEOUT,
                f"No lease on {self.name} in time: {reason}; try again or wait longer.",
                True,
            )
            for r in late
        ]

    def held(self) -> Iterator[Held]:
        if self._writer is not None:
            yield self._writer
        for client, generation in self._readers.items():
            yield Held(client, LeaseMode.RO, generation)

    def waiting(self) -> list[Request]:
        return self._queue

    def suspects(self) -> Iterator[int]:
        yield from self._aborted.values()

    def orphans(self) -> Iterator[int]:
        yield from self._aborted

    def fenced(self, client: int) -> bool:
        return False

    def _forget_reader(self, client: int) -> list[Action]:
        generation = self._readers.pop(client)
        unread = generation != self._committed and generation not in self._readers.values()
        return [Drop(self.name, generation)] if unread else []

    def _grant(self) -> list[Action]:
        """Serves the queue in order. Readers never wait for a writer once something is committed."""
        actions: list[Action] = []
        for request in list(self._queue):
            if request.mode is not LeaseMode.RW and self._committed:
                self._readers[request.client] = self._committed
                actions.append(Grant(request, LeaseMode.RO, self._committed, fresh=False))
            elif request.mode is not LeaseMode.RO and self._writer is None:
                self._last += 1
                self._writer = Held(request.client, LeaseMode.RW, self._last)
                actions.append(Grant(request, LeaseMode.RW, self._last, fresh=True))
            else:
                continue
            self._queue.remove(request)
        return actions


class EpochPool:
    """KV pages: one holder, handed from epoch to epoch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fence = -1
        self._current = 0
        self._holder: int | None = None
        self._unproved: int | None = None  # lost its lease, but may still have the current generation mapped
        self._waiter: Request | None = None
        self._orphans: dict[int, int] = {}  # generation -> the client it was taken from

    @property
    def state(self) -> PoolState:
        if self._holder is not None or self._unproved is not None:
            return PoolState.WRITING
        return PoolState.COMMITTED if self._current else PoolState.EMPTY

    @property
    def current(self) -> int:
        return self._current

    @property
    def epoch(self) -> int:
        """The highest epoch that ever asked; -1 before the first. It fences everyone below it."""
        return self._fence

    def request(self, request: Request) -> list[Action]:
        if request.mode is not LeaseMode.RW:
            message = f"{self.name} has no readers; attach to it with mode rw."
            return [Refuse(request, ErrorCode.NOT_PERMITTED, message)]
        if self._holder == request.client:
            return [_already(request)]
        busy = self._holder is not None or self._unproved is not None or self._waiter is not None
        if request.epoch < self._fence or (request.epoch == self._fence and busy):
            return [_stale(request, self._fence)]
        self._fence = request.epoch
        outdated, self._waiter = self._waiter, request
        return ([_stale(outdated, self._fence)] if outdated else []) + self._grant()

    def leave(self, client: int, proof: bool) -> list[Action]:
        actions: list[Action] = []
        if self._waiter is not None and self._waiter.client == client:
            self._waiter = None
        if self._holder == client:
            self._holder, self._unproved = None, client
        if proof:
            if self._unproved == client:
                self._unproved = None
            for generation in [g for g, owner in self._orphans.items() if owner == client]:
                del self._orphans[generation]
                actions.append(Drop(self.name, generation))
        return actions + self._grant()

    def commit(self, client: int) -> list[Action]:
        raise ValueError(f"{self.name} is never committed")

    def expire(self, now: float) -> list[Action]:
        """No proof in time: the old pages are left to the old holder, the waiter starts with new ones."""
        if self._waiter is None or self._waiter.deadline > now:
            return []
        suspect = self._holder if self._holder is not None else self._unproved
        if suspect is not None:
            self._orphans[self._current] = suspect
            self._holder = self._unproved = None
            self._current += 1
            return self._grant(fresh=True)
        return self._grant()

    def held(self) -> Iterator[Held]:
        if self._holder is not None:
            yield Held(self._holder, LeaseMode.RW, self._current)

    def waiting(self) -> list[Request]:
        return [self._waiter] if self._waiter is not None else []

    def suspects(self) -> Iterator[int]:
        if self._unproved is not None:
            yield self._unproved
        yield from self._orphans.values()

    def orphans(self) -> Iterator[int]:
        yield from self._orphans

    def fenced(self, client: int) -> bool:
        return client in self._orphans.values()

    def _grant(self, fresh: bool = False) -> list[Action]:
        if self._waiter is None or self._holder is not None or self._unproved is not None:
            return []
        request, self._waiter = self._waiter, None
        if not self._current:
            self._current, fresh = 1, True
        self._holder = request.client
        return [Grant(request, LeaseMode.RW, self._current, fresh)]


class Arbiter:
    """All pools of one service."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    @property
    def pools(self) -> dict[str, Pool]:
        return self._pools

    def attach(self, request: Request) -> list[Action]:
        pool = self._pools.get(request.pool)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                message = (
                    f"{MAX_POOLS} pools stand already, {request.pool} is one too many; restart the service to clear it."
                )
                return [Refuse(request, ErrorCode.TOO_MANY, message)]
            staged = request.pool.startswith("weights/")
            pool = self._pools[request.pool] = StagedPool(request.pool) if staged else EpochPool(request.pool)
        return self._tidy(request.pool, pool.request(request))

    def release(self, client: int, pool: str, quiesced: bool) -> list[Action]:
        return self._tidy(pool, self._pools[pool].leave(client, quiesced)) if pool in self._pools else []

    def leave(self, client: int, proof: bool) -> list[Action]:
        """The client's connection is gone (`proof`: and every process behind it). May be told again, with proof."""
        return [action for name in list(self._pools) for action in self.release(client, name, proof)]

    def commit(self, client: int, pool: str) -> list[Action]:
        return self._pools[pool].commit(client)

    def expire(self, now: float) -> list[Action]:
        return [a for name, pool in list(self._pools.items()) for a in self._tidy(name, pool.expire(now))]

    def next_deadline(self) -> float | None:
        return min((request.deadline for pool in self._pools.values() for request in pool.waiting()), default=None)

    def lease(self, client: int, pool: str) -> Held | None:
        held = self._pools[pool].held() if pool in self._pools else ()
        return next((lease for lease in held if lease.client == client), None)

    def fenced(self, client: int, pool: str) -> bool:
        return pool in self._pools and self._pools[pool].fenced(client)

    def suspected(self, client: int) -> bool:
        """Whether something waits for the proof that this client is gone."""
        return any(client in pool.suspects() for pool in self._pools.values())

    def _tidy(self, name: str, actions: list[Action]) -> list[Action]:
        """Forgets a weights pool that holds nothing: names are made of hashes and would pile up."""
        pool = self._pools[name]
        if isinstance(pool, StagedPool) and pool.idle:
            del self._pools[name]
        return actions


def _already(request: Request) -> Refuse:
    message = f"This connection holds {request.pool} already; release it first, or use the lease it has."
    return Refuse(request, ErrorCode.ALREADY_ATTACHED, message)


def _stale(request: Request, fence: int) -> Refuse:
    message = (
        f"Epoch {request.epoch} of {request.label} is fenced: {request.pool} has seen epoch {fence}. "
        "Another engine was promoted; take the lock and a new epoch first."
    )
    return Refuse(request, ErrorCode.STALE_EPOCH, message)
