"""[P] How fast requests are served, and when those that were turned away should come back. Time is passed in.

Rate: completions per second that a request has kept a place at a worker, times the places in use now. Idle time does
not make it small, and requests that hang make it so at once.

Everyone who is turned away gets an appointment of his own, one after the other at that rate, so that those who keep it
do not come back in step. And they find room: a client whose request has just ended is always the first to know of a
free place in the line, and would take it each time. So while others are expected, who comes without an appointment only
gets into a line that is less than half full. Nobody is recognised: whoever comes when an appointment is due keeps it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Final

WINDOW_SECONDS: Final = 10.0
"""What was measured counts half after so long."""
SHORTEST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 60.0
LATE_SECONDS: Final = 2.0
"""So late one may come: who reads whole seconds only comes up to one late."""
MOST_APPOINTMENTS: Final = 4096
_SHARE: Final = 0.9
"""Of the rate that appointments use: others come without one."""
_SPREAD: Final = 0.2


class ServiceRate:
    """Of one model, or of anything that keeps requests for a while."""

    __slots__ = ("_at", "_completed", "_since", "_spent", "busy")

    def __init__(self) -> None:
        self.busy = 0
        self._completed = 0.0
        self._spent = 0.0
        """Seconds that requests kept their places, all together."""
        self._at = 0.0
        self._since = 0.0

    def began(self, now: float) -> None:
        self._spent += self.busy * (now - self._at)
        self._at = now
        self.busy += 1

    def ended(self, now: float, *, completed: bool) -> None:
        self._spent += self.busy * (now - self._at)
        self._at = now
        self.busy -= 1
        if completed:
            self._completed += 1.0
            if now - self._since >= WINDOW_SECONDS:
                self._since = now
                self._completed /= 2
                self._spent /= 2

    def per_second(self, now: float) -> float:
        """Completions to expect; 0 if nothing is being served. Without a measurement, one a second and place."""
        spent = self._spent + self.busy * (now - self._at)
        return self.busy * (self._completed + 1.0) / (spent + 1.0)


class Appointments:
    """One line of requests that are not there."""

    __slots__ = ("_expected",)

    def __init__(self) -> None:
        self._expected: list[float] = []
        """When, in order; overdue ones first."""

    def make(self, now: float, per_second: float, fraction: float) -> float:
        """Seconds until whoever is turned away now should ask again. ``fraction`` (0 to 1, random) spreads them."""
        pause = 1.0 / (_SHARE * per_second) if per_second > 0 else 1.0
        ahead = len(self._expected) - bisect_right(self._expected, now)
        spread = 1.0 - _SPREAD / 2 + _SPREAD * fraction
        delay = min(max((ahead + 1) * pause * spread, SHORTEST_SECONDS), LONGEST_SECONDS)
        if len(self._expected) < MOST_APPOINTMENTS:
            insort(self._expected, now + delay)
        return delay

    def admits(self, now: float, *, waiting: int, limit: int) -> bool:
        """Whether somebody who comes now may join a line of so many."""
        expected = self._expected
        del expected[: bisect_right(expected, now - LATE_SECONDS)]
        if expected and expected[0] <= now:
            del expected[0]
            return waiting < limit
        return waiting < (max(1, limit // 2) if expected and limit else limit)
