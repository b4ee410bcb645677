"""[P] When a shortage that is looked for again and again is worth a line of the log: once, however often it comes and
goes, until it has been away for a while."""

from __future__ import annotations

from enum import Enum
from typing import Final

CALM_SECONDS: Final = 60.0


class News(Enum):
    BEGUN = "begun"
    OVER = "over"


class Shortage:
    """One episode after the other. Times are seconds of one monotonic clock."""

    __slots__ = ("_seen_at",)

    def __init__(self) -> None:
        self._seen_at: float | None = None
        """When it was seen last in the episode that goes on; ``None``: there is none."""

    def looked(self, short: bool, *, now: float) -> News | None:
        """What a look has shown; returns what is worth telling, if anything is."""
        before = self._seen_at
        if short:
            self._seen_at = now
            return News.BEGUN if before is None else None
        if before is None or now - before < CALM_SECONDS:
            return None
        self._seen_at = None
        return News.OVER
