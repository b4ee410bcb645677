"""[P] Durations by the million in little room: counted by buckets, each one per cent wider than the one before.

A percentile is its bucket's upper end, so at most one per cent too high; count, sum and maximum are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

_WIDTH: Final = math.log(1.01)
_SMALLEST: Final = 1e-6
"""Seconds; what is shorter counts as this."""


class Histogram:
    """Seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        self.max = max(self.max, seconds)
        self._buckets[math.ceil(math.log(max(seconds, _SMALLEST)) / _WIDTH)] += 1

    def add_all(self, values: Iterable[float]) -> None:
        for seconds in values:
            self.add(seconds)

    def percentile(self, share: float) -> float | None:
        """What at least this share of all values does not exceed; None, of none."""
        wanted = max(1, math.ceil(share * self.count))
        passed = 0
        for bucket in sorted(self._buckets):
            passed += self._buckets[bucket]
            if passed >= wanted:
                return min(self.max, math.exp(bucket * _WIDTH))
        return None

    def spread(self) -> dict[str, float | int | None]:
        """How many, p50, p95, p99 and max."""
        figures = {name: self.percentile(share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
        figures["max"] = self.max if self.count else None
        rounded = {name: None if value is None else round(value, 5) for name, value in figures.items()}
        return {"count": self.count, **rounded}
