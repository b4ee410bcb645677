"""[P] Which replicas said just now that they are full, and when to ask them again.

Shared by all requests: a full replica is asked in rounds, and whoever comes between two rounds waits for the next one
like those that were turned away before, so that nobody overtakes them. Time is passed in, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.liveness import ReplicaKey

PAUSE_SECONDS = 0.05
PAUSE_LIMIT_SECONDS = 0.25
FORGOTTEN_SECONDS = 10.0


@dataclass(slots=True)
class _Rest:
    until: float
    pause: float


class FullReplicas:
    """Pauses grow from round to round until a request is taken."""

    def __init__(self) -> None:
        self._rests: dict[ReplicaKey, _Rest] = {}

    def refused(self, key: ReplicaKey, now: float) -> None:
        """This replica refused a request. The first refusal ends a round; others of the same round change nothing."""
        rest = self._rests.get(key)
        if rest is None:
            self._rests = {k: r for k, r in self._rests.items() if r.until + FORGOTTEN_SECONDS > now}
            self._rests[key] = _Rest(now + PAUSE_SECONDS, PAUSE_SECONDS)
        elif now >= rest.until:
            rest.pause = min(rest.pause * 1.5, PAUSE_LIMIT_SECONDS)
            rest.until = now + rest.pause

    def took(self, key: ReplicaKey) -> None:
        """This replica answered a request: the next pause is short again."""
        rest = self._rests.get(key)
        if rest is not None:
            rest.pause = PAUSE_SECONDS

    def rests(self, key: ReplicaKey, now: float) -> bool:
        rest = self._rests.get(key)
        return rest is not None and now < rest.until

    def resting(self, now: float) -> set[ReplicaKey]:
        return {key for key, rest in self._rests.items() if now < rest.until}

    def next_round(self, now: float) -> float | None:
        """When the next replica may be asked again; ``None`` if none rests."""
        return min((rest.until for rest in self._rests.values() if now < rest.until), default=None)
