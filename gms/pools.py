"""The two kinds of pool. Pure: clients are numbers, time is passed in, decisions come back as actions.

* `weights/<layout key>` is **staged**. One writer at a time fills a new generation; readers go on with the committed
  one, which is replaced only by a commit. A writer that leaves before it leaves nothing.
* `kv` and `kv_index` are **fenced by epoch**. One holder at a time; the pages stay when it goes. A newer epoch gets
  them as soon as the old holder's end is *proved*: all its pidfds readable, or released quiesced. Without proof in time
  the newer epoch gets a new, empty generation, and the old one is an orphan until its holder is known to be gone.

A client may lose its lease without being gone: its connection closed, but its process lives and may still have pages
mapped. So every end of a lease states whether it is proof (`leave(..., proof)`), and a generation is dropped, its
memory given back, only when nobody can have it mapped for writing any more. States are derived, never stored.

After a restart of the service a pool may begin as ADOPTING: its pages live on in clients that mapped them. Nothing is
granted until they are handed back (`adopted`), or known not to come (`settle`): whoever got an empty pool meanwhile
would make a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gms.leases import Action, Cause, Drop, Grant, Held, PoolState, Refuse, Request
from gms.protocol import ErrorCode, LeaseMode


class StagedPool:
    """Weights: one writer, committed generations, many readers. `adopting` is the generation to be handed back."""

    epoch: Final = 0
    lease_epoch: Final = 0

    def __init__(self, name: str, generations: Iterator[int], *, adopting: int = 0) -> None:
        self.name = name
        self._generations = generations
        self._adopting = adopting
        self._committed = 0
        self._corrupt = ""
        self._writer: Held | None = None
        self._readers: dict[int, int] = {}
        self._queue: list[Request] = []
        self._aborted: dict[int, int] = {}  # generation -> the living client that may still have it mapped

    @property
    def state(self) -> PoolState:
        if self._adopting:
            return PoolState.ADOPTING
        if self._writer is not None:
            return PoolState.WRITING
        if self._committed:
            return PoolState.READ if self._readers else PoolState.COMMITTED
        return PoolState.EMPTY

    @property
    def current(self) -> int:
        """The committed generation (or the one to be), or the one being written if there is none; 0 for neither."""
        return self._committed or self._adopting or (self._writer.generation if self._writer else 0)

    @property
    def standing(self) -> int:
        return self._committed or self._adopting

    @property
    def adopting(self) -> bool:
        return bool(self._adopting)

    @property
    def corrupt(self) -> str:
        return self._corrupt

    @property
    def idle(self) -> bool:
        return not (self.current or self._queue or self._aborted or self._readers or self._corrupt)

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
        self._corrupt = ""
        unread = replaced and replaced not in self._readers.values()
        self._readers[client] = self._committed
        return ([Drop(self.name, replaced)] if unread else []) + self._grant()

    def inherit(self, others: frozenset[int], client: int) -> None:
        self._aborted = {g: client if owner in others else owner for g, owner in self._aborted.items()}

    def may_return(self, client: int) -> bool:
        return bool(self.standing)

    def adopted(self, client: int) -> list[Action]:
        """Readers are many: they come back by `rejoin`, each for itself."""
        if not self._adopting:
            raise ValueError(f"{self.name} is not being handed back")
        self._committed, self._adopting = self._adopting, 0
        return self._grant()

    def rejoin(self, client: int) -> None:
        """A reader of the committed generation that has it mapped already."""
        if not self._committed:
            raise ValueError(f"nothing is committed to {self.name}")
        self._readers[client] = self._committed

    def settle(self) -> list[Action]:
        lost, self._adopting = self._adopting, 0
        return ([Drop(self.name, lost)] if lost else []) + self._grant()

    def condemn(self, reason: str) -> list[Action]:
        """What is committed is wrong: its readers may keep it, nobody else gets it, and the next writer replaces it."""
        wrong, self._committed, self._adopting = self.standing, 0, 0
        if not wrong:
            return []
        self._corrupt = reason
        unread = wrong not in self._readers.values()
        return ([Drop(self.name, wrong)] if unread else []) + self._grant()

    def evict(self) -> list[Action]:
        """Gives up what is committed if nobody uses it or asks for it."""
        if self.state is not PoolState.COMMITTED or self._queue:
            return []
        unused, self._committed = self._committed, 0
        return [Drop(self.name, unused)]

    def expire(self, now: float) -> list[Action]:
        cause = self.cause()
        late = [request for request in self._queue if request.deadline <= now]
        self._queue = [request for request in self._queue if request.deadline > now]
        message = f"No lease on {self.name} in time, because {cause}; try again or wait longer."
        return [Refuse(request, ErrorCode.TIMEOUT, message, True) for request in late]

    def held(self) -> Iterator[Held]:
        if self._writer is not None:
            yield self._writer
        for client, generation in self._readers.items():
            yield Held(client, LeaseMode.RO, generation)

    def waiting(self) -> list[Request]:
        return self._queue

    def cause(self) -> Cause:
        if self._adopting:
            return Cause.ADOPTION
        return Cause.WRITER if self._writer is not None else Cause.EMPTY

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
        """Serves the queue in order. Readers never wait for a writer once something is committed, and a writer waits
        for writers only: neither can starve the other."""
        if self._adopting:
            return []
        actions: list[Action] = []
        for request in list(self._queue):
            if request.mode is not LeaseMode.RW and self._committed:
                self._readers[request.client] = self._committed
                actions.append(Grant(request, LeaseMode.RO, self._committed))
            elif request.mode is not LeaseMode.RO and self._writer is None:
                self._writer = Held(request.client, LeaseMode.RW, next(self._generations))
                actions.append(Grant(request, LeaseMode.RW, self._writer.generation))
            elif request.mode is LeaseMode.RO and self._corrupt and self._writer is None:
                actions.append(_corrupt(request, self._corrupt))
            else:
                continue
            self._queue.remove(request)
        return actions


class EpochPool:
    """KV pages: one holder, handed from epoch to epoch.

    `adopting` is the generation to be handed back after a restart, by the holder of epoch `lease_epoch` alone; `fence`
    is the highest epoch that asked before it.
    """

    corrupt: Final = ""

    def __init__(
        self, name: str, generations: Iterator[int], *, adopting: int = 0, fence: int = -1, lease_epoch: int = -1
    ) -> None:
        self.name = name
        self._generations = generations
        self._fence = fence
        self._lease_epoch = lease_epoch
        self._current = adopting
        self._adopting = bool(adopting)
        self._holder: int | None = None
        self._unproved: int | None = None  # lost its lease, but may still have the current generation mapped
        self._waiter: Request | None = None
        self._orphans: dict[int, int] = {}  # generation -> the client it was taken from

    @property
    def state(self) -> PoolState:
        if self._adopting:
            return PoolState.ADOPTING
        if self._holder is not None or self._unproved is not None:
            return PoolState.WRITING
        return PoolState.COMMITTED if self._current else PoolState.EMPTY

    @property
    def current(self) -> int:
        return self._current

    @property
    def epoch(self) -> int:
        """It fences everyone below it."""
        return self._fence

    @property
    def lease_epoch(self) -> int:
        return self._lease_epoch

    @property
    def standing(self) -> int:
        return self._current

    @property
    def adopting(self) -> bool:
        return self._adopting

    def request(self, request: Request) -> list[Action]:
        if request.mode is not LeaseMode.RW:
            message = f"{self.name} has no readers; attach to it with mode rw."
            return [Refuse(request, ErrorCode.NOT_PERMITTED, message)]
        if self._holder == request.client:
            return [_already(request)]
        unproved = self._unproved is not None and self._unproved != request.client
        busy = self._holder is not None or unproved or self._waiter is not None or self._adopting
        if request.epoch < self._fence or (request.epoch == self._fence and busy):
            return [_stale(request, self._fence)]
        self._fence = request.epoch
        if not unproved:
            self._unproved = None  # whoever gave the pages up without proof may have them back without it
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

    def inherit(self, others: frozenset[int], client: int) -> None:
        if self._unproved in others:
            self._unproved = client
        self._orphans = {g: client if owner in others else owner for g, owner in self._orphans.items()}

    def may_return(self, client: int) -> bool:
        """After a restart anyone who was granted `lease_epoch` (the caller checks); else the one who was cut off."""
        return self._adopting or self._unproved == client

    def adopted(self, client: int) -> list[Action]:
        if not self.may_return(client):
            raise ValueError(f"client {client} has nothing of {self.name} to hand back")
        self._adopting = False
        self._holder, self._unproved = client, None
        return self._grant()

    def settle(self) -> list[Action]:
        if not self._adopting:
            return []
        lost, self._current, self._adopting = self._current, 0, False
        return [Drop(self.name, lost), *self._grant()]

    def expire(self, now: float) -> list[Action]:
        """No proof in time: the old pages are left to the old holder, the waiter starts with new ones."""
        if self._waiter is None or self._waiter.deadline > now:
            return []
        if self._adopting:
            return self.settle()
        suspect = self._holder if self._holder is not None else self._unproved
        if suspect is not None:
            self._orphans[self._current] = suspect
            self._holder = self._unproved = None
            self._current = next(self._generations)
        return self._grant()

    def held(self) -> Iterator[Held]:
        if self._holder is not None:
            yield Held(self._holder, LeaseMode.RW, self._current)

    def waiting(self) -> list[Request]:
        return [self._waiter] if self._waiter is not None else []

    def cause(self) -> Cause:
        return Cause.ADOPTION if self._adopting else Cause.PROOF

    def suspects(self) -> Iterator[int]:
        if self._unproved is not None:
            yield self._unproved
        yield from self._orphans.values()

    def orphans(self) -> Iterator[int]:
        yield from self._orphans

    def fenced(self, client: int) -> bool:
        return client in self._orphans.values()

    def _grant(self) -> list[Action]:
        if self._waiter is None or self._holder is not None or self._unproved is not None or self._adopting:
            return []
        request, self._waiter = self._waiter, None
        if not self._current:
            self._current = next(self._generations)
        self._holder, self._lease_epoch = request.client, request.epoch
        return [Grant(request, LeaseMode.RW, self._current)]


def _already(request: Request) -> Refuse:
    message = f"This connection holds {request.pool} already; release it first, or use the lease it has."
    return Refuse(request, ErrorCode.ALREADY_ATTACHED, message)


def _corrupt(request: Request, reason: str) -> Refuse:
    message = f"{request.pool} is not given out: {reason}. Attach as rw_or_ro to write it anew."
    return Refuse(request, ErrorCode.CORRUPT, message)


def _stale(request: Request, fence: int) -> Refuse:
    message = (
        f"Epoch {request.epoch} of {request.label} is fenced: {request.pool} has seen epoch {fence}. "
        "Another engine was promoted; take the lock and a new epoch first."
    )
    return Refuse(request, ErrorCode.STALE_EPOCH, message)
