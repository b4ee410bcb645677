"""[P] What is known of a parked engine's self-tests, and when that is too old to count on.

A spare is worth what it can do when it is needed, and nobody asks anything of it until then. So it tests itself, first
before it calls itself STANDBY and then at intervals; one that fails ends, and the next is forked. Between a failure and
that end, and where tests do not come to an end, the pod has no spare and must say so.
"""

from __future__ import annotations

from typing import Final

import msgspec

STALE_INTERVALS: Final = 2
"""So many intervals without a test that was passed, and what a test may take on top, before a spare counts as none."""


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """The self-tests of a parked engine, as ``/state`` and ``/health`` tell of them."""

    ok: bool
    """Whether this engine may be counted on: the last test was passed, and not too long ago."""
    age_seconds: float | None
    """Since the end of the last test that was passed; None: tests are off, or none was yet."""
    passed: int
    """How many were, in this engine's life."""
    took_seconds: float
    """How long the last one took, from start to end."""
    problem: str | None = None
    """What is wrong, a sentence; None if it is ok."""


class SelfTests:
    """The record. ``interval_seconds`` 0: nobody tests, and nothing is ever too old."""

    def __init__(self, *, interval_seconds: float, timeout_seconds: float) -> None:
        self._stale_seconds = STALE_INTERVALS * interval_seconds + timeout_seconds if interval_seconds else None
        self._passed_at: float | None = None
        self._passed = 0
        self._took = 0.0
        self._problem: str | None = None

    def passed(self, *, now: float, took: float) -> None:
        self._passed_at, self._took = now, took
        self._passed += 1

    def failed(self, problem: str) -> None:
        """For good: an engine that was broken once is not trusted again."""
        self._problem = self._problem or problem

    def report(self, *, now: float) -> SelfTest:
        age = None if self._passed_at is None else now - self._passed_at
        problem = self._problem
        if problem is None and self._stale_seconds is not None:
            if age is None:
                problem = "it has not tested itself yet"
            elif age > self._stale_seconds:
                problem = f"its last self-test that was passed is {age:.0f} s ago"
        return SelfTest(
            ok=problem is None, age_seconds=age, passed=self._passed, took_seconds=self._took, problem=problem
        )
