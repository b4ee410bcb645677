"""[P] From outcomes and kills to the report."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from app.cli.bench.chaos.answers import Fate
from app.cli.bench.chaos.plan import Question
from app.cli.fault import Fault

BEFORE_SECONDS: Final = 0.05
"""A kill may be noted so long after it happened: who notes it runs beside the load."""
STOPPED_SECONDS: Final = 4.0
"""How long a stopped engine may be taken for one that answers: its keeper's patience, and a second."""
LONG_SECONDS: Final = 1.0
MAX_PROBLEMS: Final = 20


class Pause(msgspec.Struct, frozen=True):
    """A client that heard nothing, from when until when; ``time.monotonic()`` seconds."""

    begin: float
    end: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request's fate. ``client`` and ``number`` find it again in a run with the same seed."""

    client: int
    number: int
    question: Question
    fate: Fate
    detail: str
    pauses: list[Pause]


def stalls(pauses: Sequence[Pause], kills: Sequence[tuple[float, str]]) -> dict[str, list[float]]:
    """Seconds of silence by kind of kill: of each pause that a kill falls into, under the first such kill; but a long
    one in which an engine is stopped and not yet killed is that one's, since others end sooner.

    ``kills``: (moment, kind), oldest first. Pauses without a kill are the machine's, and left out.
    """
    moments = [moment for moment, _ in kills]
    stops = [moment for moment, kind in kills if kind == Fault.STOP_ACTIVE]
    found: dict[str, list[float]] = {kind: [] for _, kind in kills}
    for pause in pauses:
        seconds = pause.end - pause.begin
        if seconds >= LONG_SECONDS and any(
            stop <= pause.end and pause.begin <= stop + STOPPED_SECONDS for stop in stops
        ):
            found[Fault.STOP_ACTIVE].append(seconds)
            continue
        first = bisect.bisect_left(moments, pause.begin)
        if first < len(kills) and moments[first] <= pause.end + BEFORE_SECONDS:
            found[kills[first][1]].append(seconds)
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """How many, p50, p99 and max."""
    figures = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values, default=None)}
    return {"count": len(values), **{name: None if x is None else round(x, 4) for name, x in figures.items()}}


def report(
    outcomes: Sequence[Outcome],
    kills: Sequence[tuple[float, str]],
    *,
    skipped: int,
    late: Sequence[float],
    plan: dict[str, Any],
) -> dict[str, Any]:
    """The result; ``plan`` is what the run was told to do, and comes first; ``late``: by how much the load's own timers
    were late, which is what the machine adds to every silence."""
    fates = Counter(outcome.fate for outcome in outcomes)
    pauses = [pause for outcome in outcomes for pause in outcome.pauses]
    bad = [outcome for outcome in outcomes if outcome.fate in (Fate.LOST, Fate.WRONG)]
    bad.sort(key=lambda outcome: outcome.fate is Fate.LOST)
    return {
        **plan,
        "requests": len(outcomes),
        "good": fates[Fate.GOOD],
        "left": fates[Fate.LEFT],
        "lost": fates[Fate.LOST],
        "wrong": fates[Fate.WRONG],
        "refused": dict(Counter(outcome.detail for outcome in outcomes if outcome.fate is Fate.REFUSED)),
        "by_manner": dict(Counter(outcome.question.manner.value for outcome in outcomes)),
        "kills": {"all": len(kills), **Counter(kind for _, kind in kills)},
        "kills_skipped": skipped,
        "stall_seconds": {kind: spread(values) for kind, values in stalls(pauses, kills).items()},
        "late_seconds": spread(late),
        "problems": [
            f"{outcome.fate}: request {outcome.number} of client {outcome.client}, {outcome.question.manner} "
            f"{outcome.question.path}: {outcome.detail}"
            for outcome in bad[:MAX_PROBLEMS]
        ],
    }
