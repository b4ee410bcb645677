"""[P] What a gateway sees of an engine's death and of the next one's promotion, in parts. Seconds of one clock.

When the lock became free only the engine knows that has it now, and perhaps on another machine. Its first line says how
long ago that was, which is true on any clock, late by the line's way here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from app.fleet.liveness import WorkerState


def recovery_times(
    states: Sequence[tuple[WorkerState, float]], *, line_at: float, lock_seconds: float
) -> dict[str, float]:
    """By phase (docs/metrics.md). ``states``: those of the worker until now, with their moments, oldest first; the next
    engine's first line came at ``line_at`` and says ``lock_seconds``. Empty: it does not say."""
    if lock_seconds < 0:
        return {}
    times = {"routable": lock_seconds}
    # A doubt that had passed before was about something else.
    missing = list(takewhile(lambda state: state[0] is not WorkerState.UP, reversed(states)))
    if missing:
        times["detect"] = max(0.0, missing[-1][1] - (line_at - lock_seconds))
    return times
