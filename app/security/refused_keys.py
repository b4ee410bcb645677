"""[P] When refused keys are worth a line of the log: whoever guesses must be seen, and must not fill the log."""

from __future__ import annotations

from typing import Final

PAUSE_SECONDS: Final = 1.0


class RefusedKeys:
    """Counts what is not told yet. Times are seconds of one monotonic clock."""

    __slots__ = ("_next", "_untold")

    def __init__(self) -> None:
        self._untold = 0
        self._next = 0.0

    def refused(self, *, now: float) -> int:
        """One more. Returns how many there were since the last line, if it is time for another; else 0."""
        self._untold += 1
        if now < self._next:
            return 0
        self._next = now + PAUSE_SECONDS
        untold, self._untold = self._untold, 0
        return untold
