"""[P] The order in which a terminating engine lets go of its requests, and how long each part may take.

    GRACE ──► WAITING ──► DRAINED
      │          └──────► OVERRUN
      └── nobody watches any more, or its time is over

In GRACE the watch says DRAINING, so gateways send nothing new, and what comes nevertheless is served: from whoever had
not heard of it. In WAITING new requests are refused; those that are not waited for are cut, once, at its beginning. The
time for both together is one. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum

import msgspec

from workers.route_groups import RouteGroup


class Phase(StrEnum):
    GRACE = "grace"
    WAITING = "waiting"
    DRAINED = "drained"
    OVERRUN = "overrun"


class DrainFacts(msgspec.Struct, frozen=True, kw_only=True):
    watches: int
    """Gateways that listen."""
    requests: Mapping[RouteGroup, int]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now. ``cut``: end the requests of these groups; ``again_in``: look again after so many seconds at the
    latest, or when a fact has changed."""

    phase: Phase
    refuse: bool
    cut: frozenset[RouteGroup]
    again_in: float
    left_seconds: float
    """Until what remains is cut."""

    @property
    def over(self) -> bool:
        return self.phase in (Phase.DRAINED, Phase.OVERRUN)


class DrainPlan:
    """One shutdown's."""

    def __init__(self, *, now: float, grace_seconds: float, timeout_seconds: float, waits_for: Set[RouteGroup]) -> None:
        self.began = now
        self._grace_until = now + grace_seconds
        self._until = now + timeout_seconds
        self._cut = frozenset(RouteGroup) - waits_for
        self._waiting = False

    def look(self, facts: DrainFacts, *, now: float) -> Look:
        """Take the facts in."""
        if not self._waiting and facts.watches and now < self._grace_until:
            return self._say(Phase.GRACE, now, until=self._grace_until)
        began, self._waiting = not self._waiting, True
        cut = self._cut if began else frozenset[RouteGroup]()
        if not any(count for group, count in facts.requests.items() if group not in self._cut):
            return self._say(Phase.DRAINED, now, cut=cut)
        if now >= self._until:
            return self._say(Phase.OVERRUN, now, cut=cut)
        return self._say(Phase.WAITING, now, until=self._until, cut=cut)

    def _say(
        self, phase: Phase, now: float, *, until: float | None = None, cut: frozenset[RouteGroup] = frozenset()
    ) -> Look:
        return Look(
            phase=phase,
            refuse=phase is not Phase.GRACE,
            cut=cut,
            again_in=0.0 if until is None else max(0.0, until - now),
            left_seconds=max(0.0, self._until - now),
        )
