"""[P] Whether an engine died, or only a connection to it broke. Time is passed in, in seconds.

A connection's break usually comes first, and alone says nothing. The watch decides: if it ends as well, without having
said that the engine was about to leave and without our having closed it, the engine died; a line that was written after
the break says that it lives.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from app.fleet.liveness import ReplicaKey, clears_suspicion

WINDOW_SECONDS: Final = 5.0
"""A break so long before the watch's end belongs to the same death, and any after it: a process that dies takes a while
to close everything, and one that was hung until its keeper killed it had broken nothing before."""
REMEMBERED_SECONDS: Final = 60.0


class Fate(Enum):
    DIED = "died"
    LIVED = "lived"
    OPEN = "open"
    """Not known yet."""


class Deaths:
    """Of the last minute."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[ReplicaKey, float] = {}

    def add(self, key: ReplicaKey, now: float) -> None:
        """This promotion's engine died."""
        self._at = {key: at for key, at in self._at.items() if now - at < REMEMBERED_SECONDS}
        self._at[key] = now

    def fate(self, key: ReplicaKey, broke_at: float, *, line_at: float, connected: bool) -> Fate:
        """What became of the engine that a connection broke to. ``line_at``: when its watch spoke last."""
        died_at = self._at.get(key)
        if died_at is not None:
            return Fate.DIED if died_at - broke_at <= WINDOW_SECONDS else Fate.LIVED
        if not connected or clears_suspicion(broke_at, line_at):
            return Fate.LIVED
        return Fate.OPEN
