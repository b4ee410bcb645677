"""What a run will do, as its seed says: which kills at which second, and what each client asks, in order.

A run with the same seed plans the same kills for the same moments, and each client asks the same in the same order.
What cannot be planned is time: how far each answer is when a kill comes, and so how many requests a run has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from app.cli.fault import Fault

KINDS: Final = {Fault.KILL_ACTIVE: 70, Fault.STOP_ACTIVE: 8, Fault.KILL_SHADOW: 10, Fault.KILL_GMS: 12}
"""Of a hundred kills."""

ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

_WORDS: Final = (
    *("tell", "me", "about", "rivers", "bridges", "islands", "lanterns", "copper", "winter", "ladders", "market"),
    *(
        "harbour",
        "engines",
        "spare",
        "wheels",
        "gardens",
        "Zürich",
        "東京",
        "мир",
        "and",
        "what",
        "else",
        "there",
        "is",
    ),
)


class Manner(StrEnum):
    """How a client takes its answer."""

    STREAM = "stream"
    WHOLE = "whole"
    """Not streamed."""
    CANCEL = "cancel"
    """Leaves a stream in the middle."""
    SLOW = "slow"
    """Reads a stream so slowly that the gateway must hold the worker back."""
    REALTIME = "realtime"
    """Two responses of a session over a WebSocket."""


MANNERS: Final = {Manner.STREAM: 62, Manner.WHOLE: 20, Manner.CANCEL: 7, Manner.SLOW: 5, Manner.REALTIME: 6}
"""Of a hundred requests."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: seconds after the load began. ``pods``: whom to try, in this order."""

    at: float
    fault: Fault
    pods: tuple[str, ...]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``prompt`` and ``tokens`` have two entries for a session, and otherwise one."""

    path: str
    manner: Manner
    prompts: tuple[str, ...]
    tokens: int
    stop: bool = False
    """Whether a stop string, which the answer has in it, ends it early."""
    usage: bool = False
    leave_after: int = 0
    """After how many reads a client that cancels leaves."""

    @property
    def streams(self) -> bool:
        return self.manner is not Manner.WHOLE


def kills(*, seed: int, seconds: float, every: float, pods: int) -> list[Kill]:
    """One kill in each interval of ``every`` seconds, at a moment in its first half."""
    chance = random.Random(f"kills {seed}")  # noqa: S311 - not for secrets
    names = [f"pod-{number}" for number in range(pods)]
    planned = []
    for number in range(1, int(seconds / every)):
        (fault,) = chance.choices(list(KINDS), weights=list(KINDS.values()))
        order = tuple(chance.sample(names, k=len(names)))
        planned.append(Kill(at=(number + chance.random() / 2) * every, fault=fault, pods=order))
    return planned


def questions(*, seed: int, client: int, longest: int = 40) -> Iterator[Question]:
    """What one client asks, without end; answers have at most ``longest`` tokens."""
    chance = random.Random(f"client {client} {seed}")  # noqa: S311 - not for secrets
    while True:
        (manner,) = chance.choices(list(MANNERS), weights=list(MANNERS.values()))
        rounds = 2 if manner is Manner.REALTIME else 1
        yield Question(
            path="/v1/realtime" if manner is Manner.REALTIME else chance.choice(ROUTES),
            manner=manner,
            prompts=tuple(" ".join(chance.choices(_WORDS, k=chance.randint(2, 12))) for _ in range(rounds)),
            tokens=chance.randint(1, longest) if manner is not Manner.SLOW else 4 * longest,
            stop=chance.random() < 0.1,
            usage=chance.random() < 0.5,
            leave_after=chance.randint(1, 8),
        )
