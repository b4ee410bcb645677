"""[P] When it is worth a line of the log that nobody serves a model any more: not in the pause of a promotion, once for
each outage, and once when it is over. Times are seconds of one monotonic clock."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

GONE_SECONDS: Final = 1.0
"""A promotion takes milliseconds; what lasts this long is none."""
NOBODY_SECONDS: Final = 60.0
"""So long there may be no routable worker, where ``/health`` depends on one."""
_REMEMBERED_MODELS: Final = 1024


def nobody_for_too_long(since: float | None, *, now: float) -> bool:
    """Whether ``/health`` says 503 for want of workers, where it may. ``since``: when the last routable one went."""
    return since is not None and now - since >= NOBODY_SECONDS


@dataclass(frozen=True, slots=True)
class OutageNews:
    gone: list[str]
    """Models that nobody has served for a while, by their names."""
    back: list[str]
    """Those of them that are served again."""
    seconds: float = 0.0
    """How long the longest outage of those was."""


class Outages:
    """Look as often as you like: whoever is served is told by those who know."""

    __slots__ = ("_gone", "_served", "_told")

    def __init__(self) -> None:
        self._served: frozenset[str] = frozenset()
        self._gone: dict[str, float] = {}
        """Models that were served once and are not now, and since when, longest first."""
        self._told: set[str] = set()

    def looked(self, served: Set[str], *, now: float) -> OutageNews:
        """``served``: the models that a routable worker serves. Returns what is worth telling."""
        if not self._gone and served == self._served:
            return OutageNews([], [])
        for model in sorted(self._served - served):
            self._gone[model] = now
            if len(self._gone) > _REMEMBERED_MODELS:
                self._forget(next(iter(self._gone)))
        self._served = frozenset(served)
        returned = {model: now - since for model, since in self._gone.items() if model in served}
        back = sorted(self._told & returned.keys())
        for model in returned:
            self._forget(model)
        gone = [m for m, since in self._gone.items() if m not in self._told and now - since >= GONE_SECONDS]
        self._told.update(gone)
        return OutageNews(gone, back, max((returned[model] for model in back), default=0.0))

    def _forget(self, model: str) -> None:
        del self._gone[model]
        self._told.discard(model)
