"""The words of arbitration: what is asked, what is decided, what a pool can do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gms.protocol import ErrorCode, GmsError, LeaseMode


class PoolState(StrEnum):
    EMPTY = "EMPTY"
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    """Pages stand, nobody is attached. In the kv pools too: the last holder is gone, the next one takes them over."""
    READ = "READ"
    ADOPTING = "ADOPTING"
    """After a restart: a journal says what stood here, and clients that still have it are handing it back."""


class Cause(StrEnum):
    """What a request waits for; the value completes "because ..."."""

    ADOPTION = "its pages are still being handed back after a restart of the service"
    EMPTY = "nobody has committed anything to it"
    PROOF = "nothing proves yet that its last holder is gone"
    WRITER = "another client is still writing it"


class Generations:
    """The numbers of generations, of all pools together: one never means two things. `last` is the newest given out."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.last += 1
        return self.last


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
    def epoch(self) -> int:
        """The highest epoch that ever asked, 0 where epochs mean nothing; -1 before the first."""
        ...

    @property
    def lease_epoch(self) -> int:
        """The epoch that the present or last holder was granted."""
        ...

    @property
    def standing(self) -> int:
        """The generation that would be handed back if the service started again now; 0 for none."""
        ...

    @property
    def recorded(self) -> int:
        """The generation that the next service must know of; 0 for none."""
        ...

    @property
    def awaited(self) -> list[int]:
        """Generations that are to be handed back after a restart."""
        ...

    @property
    def corrupt(self) -> str:
        """Why what was committed is given to nobody any more; empty if all is well."""
        ...

    @property
    def condemned(self) -> Mapping[int, str]:
        """Generations that were found to be wrong, and why."""
        ...

    def request(self, request: Request) -> list[Action]: ...
    def leave(self, client: int, proof: bool) -> list[Action]: ...
    def commit(self, client: int) -> list[Action]: ...
    def expire(self, now: float) -> list[Action]: ...
    def held(self) -> Iterator[Held]: ...
    def waiting(self) -> list[Request]: ...
    def cause(self) -> Cause:
        """What the first of those waits for."""
        ...

    def inherit(self, others: frozenset[int], client: int) -> None:
        """These clients are earlier connections of the process behind `client`: what waits for their proof waits for
        that of `client`, who may also have it back."""
        ...

    def may_return(self, client: int) -> bool:
        """Whether `client` may go on with the current generation, which it says it has mapped."""
        ...

    def adopted(self, client: int) -> list[Action]:
        """Everything is handed back; `client` is the holder that did it, for pools that have one. Raises ValueError
        where nothing was to be."""
        ...

    def settle(self, generation: int) -> list[Action]:
        """No more of this generation will be handed back: goes on without. Harmless if it is not awaited."""
        ...

    def suspects(self) -> Iterator[int]:
        """Clients whose end is to be proved."""
        ...

    def orphans(self) -> Iterator[int]:
        """Generations that only wait for such a proof."""
        ...

    def fenced(self, client: int) -> bool: ...


def already_attached(request: Request) -> Refuse:
    message = f"This connection holds {request.pool} already; release it first, or use the lease it has."
    return Refuse(request, ErrorCode.ALREADY_ATTACHED, message)


def fenced(pool: str) -> GmsError:
    message = f"A newer epoch took {pool} over; this engine must stop serving and touch its pages no more."
    return GmsError(ErrorCode.FENCED, message)
