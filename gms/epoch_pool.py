"""KV pages: one holder after the other, fenced by epoch. Pure, as `gms.staged_pool`, which also says what ADOPTING is.

The pages stay when their holder goes. A newer epoch gets them as soon as the old holder's end is *proved*: all its
pidfds readable, or released quiesced. Until then it is *unproved*. Without proof in time the newer epoch gets a new,
empty generation, and the old one is an *orphan* until its holder is known to be gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from gms.leases import Action, Cause, Drop, Grant, Held, PoolState, Refuse, Request, already_attached
from gms.protocol import ErrorCode, LeaseMode


class EpochPool:
    """KV pages: one holder, handed from epoch to epoch.

    `adopting` is the generation to be handed back after a restart, by the holder of epoch `lease_epoch` alone; `fence`
    is the highest epoch that asked before it.
    """

    corrupt: Final = ""
    condemned: Final[Mapping[int, str]] = MappingProxyType({})

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
    def recorded(self) -> int:
        return self._current

    @property
    def awaited(self) -> list[int]:
        return [self._current] if self._adopting else []

    def request(self, request: Request) -> list[Action]:
        if request.mode is not LeaseMode.RW:
            message = f"{self.name} has no readers; attach to it with mode rw."
            return [Refuse(request, ErrorCode.NOT_PERMITTED, message)]
        if self._holder == request.client:
            return [already_attached(request)]
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

    def settle(self, generation: int) -> list[Action]:
        if generation not in self.awaited:
            return []
        lost, self._current, self._adopting = self._current, 0, False
        return [Drop(self.name, lost), *self._grant()]

    def expire(self, now: float) -> list[Action]:
        """No proof in time: the old pages are left to the old holder, the waiter starts with new ones."""
        if self._waiter is None or self._waiter.deadline > now:
            return []
        if self._adopting:
            return self.settle(self._current)
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


def _stale(request: Request, fence: int) -> Refuse:
    message = (
        f"Epoch {request.epoch} of {request.label} is fenced: {request.pool} has seen epoch {fence}. "
        "Another engine was promoted; take the lock and a new epoch first."
    )
    return Refuse(request, ErrorCode.STALE_EPOCH, message)
