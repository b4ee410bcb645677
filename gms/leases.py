"""The words of arbitration: what is asked, what is decided, what a pool can do. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gms.protocol import ErrorCode, LeaseMode


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
