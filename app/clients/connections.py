"""How many clients are connected, and what becomes of one too many.

Such a connection is taken, so that its client learns why (503) and probes are answered even then: it may ask for one
thing, soon, and ends with the answer. Only when many of those wait is the next one closed at once: descriptors and
memory are bounded by it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

SURPLUS: Final = 256
"""Connections beyond the limit that wait for their 503, or are probes."""
SURPLUS_HEAD_SECONDS: Final = 5.0
_OWN_FILES: Final = 32
"""What a process has open before its first client: logs, loops, listeners, its words with workers."""


class Room(Enum):
    FREE = "free"
    SURPLUS = "surplus"
    """For a refusal, or for a probe."""
    NONE = "none"


def room_within(files: int, wanted: int) -> tuple[int, int]:
    """How many connections there may be, and how many beyond, in a process that may have so many files open. A stream
    takes two: where none is left, clients see connections that break, and workers cannot be reached."""
    left = files - _OWN_FILES
    surplus = min(SURPLUS, max(1, left // 8))
    return max(1, min(wanted, (left - surplus) // 2)), surplus


class Connections:
    """``on_refused`` is told of each connection that had no room, or asked for something that is no probe."""

    def __init__(self, *, limit: int, on_refused: Callable[[], None], surplus: int = SURPLUS) -> None:
        self.limit = limit
        self._most = limit + surplus
        self.open = 0
        self.refused = on_refused

    def enter(self) -> Room:
        """One more. Each has to :meth:`leave`, whatever its room is."""
        self.open += 1
        if self.open <= self.limit:
            return Room.FREE
        if self.open <= self._most:
            return Room.SURPLUS
        self.refused()
        return Room.NONE

    def leave(self) -> None:
        self.open -= 1
