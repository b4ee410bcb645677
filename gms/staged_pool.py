"""Weights: written once, read by many. Pure: clients are numbers, time is passed in, decisions come back as actions.

One writer at a time fills a new generation; readers go on with the committed one, which is replaced only by a commit. A
writer that leaves before it leaves nothing. A client may lose its lease without being gone: its connection closed, but
its process lives and may still have pages mapped. So every end of a lease states whether it is proof, and an *aborted*
generation is dropped, its memory given back, only when nobody can write to it any more.

After a restart of the service a pool may begin as ADOPTING: its pages live on in clients that mapped them. Nothing is
granted until they are handed back (`adopted`), or known not to come (`settle`): whoever got an empty pool meanwhile
would make a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from gms.leases import Action, Cause, Drop, Grant, Held, PoolState, Refuse, Request, already_attached
from gms.protocol import ErrorCode, LeaseMode

MAX_CONDEMNED: Final = 16
"""The newest so many are remembered."""


class StagedPool:
    """Weights: one writer, committed generations, many readers.

    After a restart `adopting` is the committed generation that its readers are to hand back, `returning` the one whose
    writer had asked for the commit and is to hand back itself, each 0 for none. `corrupt`: why nobody gets what was
    committed; `condemned`: the generations that were found wrong, and why, also those that were replaced since.
    """

    epoch: Final = 0
    lease_epoch: Final = 0

    def __init__(
        self,
        name: str,
        generations: Iterator[int],
        *,
        adopting: int = 0,
        returning: int = 0,
        corrupt: str = "",
        condemned: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._generations = generations
        self._adopting = adopting
        self._returning = returning
        self._committed = 0
        self._corrupt = corrupt
        self._condemned = dict(condemned)
        self._writer: Held | None = None
        self._readers: dict[int, int] = {}
        self._queue: list[Request] = []
        self._aborted: dict[int, int] = {}  # generation -> the living client that may still have it mapped

    @property
    def state(self) -> PoolState:
        if self._adopting or (self._returning and not self._committed):
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
    def recorded(self) -> int:
        """A condemned one too, if nothing stands: its readers must still be told."""
        return self.standing or max(self._condemned, default=0)

    @property
    def condemned(self) -> Mapping[int, str]:
        return self._condemned

    @property
    def awaited(self) -> list[int]:
        return [generation for generation in (self._adopting, self._returning) if generation]

    @property
    def corrupt(self) -> str:
        return self._corrupt

    @property
    def idle(self) -> bool:
        kept = self._returning or self._queue or self._aborted or self._readers or self._condemned
        return not (self.current or kept)

    def request(self, request: Request) -> list[Action]:
        if any(held.client == request.client for held in self.held()):
            return [already_attached(request)]
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
        replaced, self._committed, self._writer = self.standing, self._writer.generation, None
        self._adopting = 0  # what was still to be handed back is out of date
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

    def write_on(self, client: int) -> None:
        """The writer has handed back what it wrote, and goes on."""
        if not self._returning:
            raise ValueError(f"no writer of {self.name} is to come back")
        self._writer, self._returning = Held(client, LeaseMode.RW, self._returning), 0

    def settle(self, generation: int) -> list[Action]:
        if generation not in self.awaited:
            return []
        self._adopting = 0 if generation == self._adopting else self._adopting
        self._returning = 0 if generation == self._returning else self._returning
        return [Drop(self.name, generation), *self._grant()]

    def condemn(self, reason: str) -> list[Action]:
        """What is committed is wrong: its readers may keep it, nobody else gets it, and the next writer replaces it."""
        wrong, self._committed, self._adopting = self.standing, 0, 0
        if not wrong:
            return []
        self._corrupt = self._condemned[wrong] = reason
        self._condemned = dict(sorted(self._condemned.items())[-MAX_CONDEMNED:])
        unread = wrong not in self._readers.values()
        return ([Drop(self.name, wrong)] if unread else []) + self._grant()

    @property
    def unused(self) -> bool:
        """Whether something is committed that nobody uses or asks for."""
        return self.state is PoolState.COMMITTED and not self._queue

    def evict(self) -> list[Action]:
        """Gives it up if it is unused."""
        if not self.unused:
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
        if self._adopting or self._returning:
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
            elif request.mode is not LeaseMode.RO and self._writer is None and not self._returning:
                self._writer = Held(request.client, LeaseMode.RW, next(self._generations))
                actions.append(Grant(request, LeaseMode.RW, self._writer.generation))
            elif request.mode is LeaseMode.RO and self._corrupt and self._writer is None:
                actions.append(_corrupt(request, self._corrupt))
            else:
                continue
            self._queue.remove(request)
        return actions


def _corrupt(request: Request, reason: str) -> Refuse:
    message = f"{request.pool} is not given out: {reason}. Attach as rw_or_ro to write it anew."
    return Refuse(request, ErrorCode.CORRUPT, message)
