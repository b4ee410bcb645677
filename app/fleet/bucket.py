"""[P] How many times a second something may happen. Time is passed in, in seconds."""

from __future__ import annotations


class TokenBucket:
    """``per_second`` on average, and as many at once after a second of rest; 0: no limit."""

    __slots__ = ("_at", "_level", "_per_second")

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._level = max(1.0, per_second)
        self._at = 0.0

    def open(self, now: float) -> bool:
        """Whether one more may happen now."""
        return not self._per_second or self._filled(now) >= 1.0

    def take(self, now: float) -> None:
        """One does."""
        if self._per_second:
            self._level = self._filled(now) - 1.0
            self._at = now

    def opens_at(self, now: float) -> float:
        """When one more may happen; ``now`` or earlier if that is so already."""
        if not self._per_second:
            return now
        return now + (1.0 - self._filled(now)) / self._per_second

    def _filled(self, now: float) -> float:
        return min(max(1.0, self._per_second), self._level + max(0.0, now - self._at) * self._per_second)
