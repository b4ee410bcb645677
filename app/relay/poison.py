"""[P] Which request kills the engines that take it.

An engine's death counts against a request only if the request gained nothing there since it was last started: one that
gains anything is clear again. Two deaths in a row make it a *suspect*. Suspects are started after all others, and one
at a time on each engine, so that each is alone there as suspect. Three more deaths, alone, convict it: it ends, and for
some minutes the same bytes are refused without being tried. Fewer would do if engines died of nothing else; under a
fault that kills one every second, innocent requests were convicted by them. Innocent ones that died beside the guilty
one twice are suspects as well, and go on as soon as they gain anything.

Time is passed in, in seconds. What is here is one gateway process's knowledge: others have their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from app.fleet.liveness import ReplicaKey

REFUSED_SECONDS: Final = 600.0
MOST_REFUSED: Final = 1024
"""Bodies that are refused; a further one takes the place of the oldest."""


class Standing(Enum):
    CLEAR = "clear"
    COUNTED = "counted"
    """One death."""
    SUSPECT = "suspect"
    """Two in a row, or more."""
    ACCUSED = "accused"
    """Another one while it was the only suspect."""
    ACCUSED_TWICE = "accused twice"
    """And one more."""
    CONVICTED = "convicted"


class Event(Enum):
    GAINED = "gained"
    """It has more of its answer than when it was last started."""
    DIED = "died"
    """Its engine died, and it had gained nothing there."""
    DIED_ALONE = "died alone"
    """Likewise, and it was the only suspect there."""
    LIVED = "lived"
    """It broke off without having gained anything, but its engine lived on: the network, or a stall."""


TRANSITIONS: Final[Mapping[tuple[Standing, Event], Standing]] = MappingProxyType(
    {
        (Standing.CLEAR, Event.GAINED): Standing.CLEAR,
        (Standing.CLEAR, Event.DIED): Standing.COUNTED,
        (Standing.CLEAR, Event.LIVED): Standing.CLEAR,
        (Standing.COUNTED, Event.GAINED): Standing.CLEAR,
        (Standing.COUNTED, Event.DIED): Standing.SUSPECT,
        (Standing.COUNTED, Event.LIVED): Standing.COUNTED,
        (Standing.SUSPECT, Event.GAINED): Standing.CLEAR,
        (Standing.SUSPECT, Event.DIED): Standing.SUSPECT,
        (Standing.SUSPECT, Event.DIED_ALONE): Standing.ACCUSED,
        (Standing.SUSPECT, Event.LIVED): Standing.SUSPECT,
        (Standing.ACCUSED, Event.GAINED): Standing.CLEAR,
        (Standing.ACCUSED, Event.DIED): Standing.ACCUSED,
        (Standing.ACCUSED, Event.DIED_ALONE): Standing.ACCUSED_TWICE,
        (Standing.ACCUSED, Event.LIVED): Standing.ACCUSED,
        (Standing.ACCUSED_TWICE, Event.GAINED): Standing.CLEAR,
        (Standing.ACCUSED_TWICE, Event.DIED): Standing.ACCUSED_TWICE,
        (Standing.ACCUSED_TWICE, Event.DIED_ALONE): Standing.CONVICTED,
        (Standing.ACCUSED_TWICE, Event.LIVED): Standing.ACCUSED_TWICE,
    }
)
"""All else is a bug: only suspects run alone, and what is convicted is over."""


def after(standing: Standing, event: Event) -> Standing:
    """Raises:
    ValueError: this cannot happen to such a request.
    """
    try:
        return TRANSITIONS[standing, event]
    except KeyError:
        raise ValueError(f"{event} cannot happen to a request that is {standing}") from None


class Suspects:
    """Where suspects are: one at most on each engine. Who is next on one is the line's to say, as for all requests."""

    __slots__ = ("_at", "moved_at")

    def __init__(self) -> None:
        self._at: dict[ReplicaKey, int] = {}
        self.moved_at = 0.0
        """When one gained something or ended last, wherever: others may have their turn."""

    def admits(self, engine: ReplicaKey) -> bool:
        """Whether a suspect may go there."""
        return engine not in self._at

    def enter(self, engine: ReplicaKey, order: int) -> None:
        """``order``: the request's age, nobody else's. Only where one may go. Pair with :meth:`leave`."""
        self._at[engine] = order

    def leave(self, engine: ReplicaKey, order: int, now: float) -> None:
        """It is no suspect any more, or not there. Idempotent."""
        if self._at.get(engine) == order:
            del self._at[engine]
            self.moved_at = now

    def __len__(self) -> int:
        return len(self._at)


class RefusedBodies:
    """What is not tried again for a while. Of a body, its length and a keyed hash are kept."""

    __slots__ = ("_key", "marks")

    def __init__(self, key: bytes) -> None:
        """``key``: random, of this process, so that nobody can make another body with the same hash."""
        self._key = key
        self.marks: dict[tuple[int, bytes], float] = {}
        """Until when, in the order in which they were added. Empty in nearly every process."""

    def add(self, path: str, body: bytes, now: float) -> None:
        mark = self._mark(path, body)
        self.marks.pop(mark, None)
        if len(self.marks) >= MOST_REFUSED:
            del self.marks[next(iter(self.marks))]
        self.marks[mark] = now + REFUSED_SECONDS

    def has(self, path: str, body: bytes, now: float) -> bool:
        """Costs a hash only if a body of that length is refused."""
        while self.marks and self.marks[oldest := next(iter(self.marks))] <= now:
            del self.marks[oldest]
        length = len(body)
        return any(size == length for size, _ in self.marks) and self._mark(path, body) in self.marks

    def _mark(self, path: str, body: bytes) -> tuple[int, bytes]:
        digest = blake2b(body, digest_size=16, key=self._key)
        digest.update(b"\0" + path.encode())
        return len(body), digest.digest()
