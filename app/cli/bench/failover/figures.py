"""[P] One arm's figures, and the report over all of them. docs/failover.md lists the fields.

Figures are counted in the run's own seconds and tokens, and then put into the plan's (``Plan.real_seconds``): what was
measured stands beside it under ``measured``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from app.cli.bench.failover.scale import REFERENCE, Plan
from app.cli.bench.failover.series import Limits, Record, edges, shares, spread, thinned, user_rates

BIN_SECONDS: Final = 10.0
"""Of the plan."""
MOST_POINTS: Final = 300
SLOW: Final = 1.05
"""A machine that needs so much longer for its simulated steps was too slow for the run."""
LATE_SECONDS: Final = 0.1
"""Nor may the load's requests be later than that at their 99th percentile; the run's seconds."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one worker."""

    at: float
    worker: str
    inflight: int
    waiting: int | None
    """Of these, those that wait at the engine; None: it does not say."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated accelerator did in one promotion, as far as it was seen."""

    worker: str
    epoch: int
    steps: int
    wanted_seconds: float
    took_seconds: float
    latest_seconds: float
    prefilled_tokens: int
    prefilled_again_tokens: int
    cached_tokens: int


class Seen(msgspec.Struct, kw_only=True):
    """What one arm showed. Moments are ``time.monotonic()`` seconds."""

    arm: str
    meaning: str
    began: float
    """When the load began."""
    killed: float
    victim: str
    ended: float
    """When the load ended; answers went on until they were whole."""
    detected: float | None = None
    """The gateway knew of it."""
    routable: float | None = None
    """The gateway routed to the worker again."""
    spare: float | None = None
    """The worker had a spare again; None also for arms without."""
    interrupted: int = 0
    """Requests that the engine had when it was killed."""
    records: list[Record] = []
    samples: list[Sample] = []
    lives: list[Life] = []
    load_average: tuple[float, float] = (0.0, 0.0)


def figures(seen: Seen, plan: Plan) -> dict[str, Any]:
    """One arm's part of the report."""
    zero, records = seen.killed, seen.records
    limits = Limits(ttft=plan.seconds(plan.ttft_limit_seconds), rate=plan.rate_limit * plan.speed / plan.group)
    wanted = sum(life.wanted_seconds for life in seen.lives)
    report: dict[str, Any] = {
        "meaning": seen.meaning,
        "routable_seconds": _real(plan, seen.routable, zero),
        "detected_seconds": _real(plan, seen.detected, zero),
        "spare_seconds": _real(plan, seen.spare, zero),
        "measured": {
            name: None if moment is None else round(moment - zero, 4)
            for name, moment in (
                ("routable_seconds", seen.routable),
                ("detected_seconds", seen.detected),
                ("spare_seconds", seen.spare),
            )
        },
        "requests": len(records),
        "lost": sum(one.lost for one in records),
        "interrupted": seen.interrupted,
        "resumed": sum(one.resumes > 0 for one in records),
        "run_again": sum(one.retries > 0 for one in records),
        "before": _service([one for one in records if one.due < zero], plan, limits),
        "after": _service([one for one in records if one.due >= zero], plan, limits),
        "stall_seconds": _spread([one.stall(zero) for one in records if one.resumes], plan.real_seconds),
        "prefilled_again_tokens": _tokens(plan, seen.lives, "prefilled_again_tokens"),
        "cached_tokens": _tokens(plan, seen.lives, "cached_tokens"),
        "step_ratio": round(sum(life.took_seconds for life in seen.lives) / wanted, 4) if wanted else None,
        "step_latest_seconds": round(max((life.latest_seconds for life in seen.lives), default=0.0), 4),
        "late_seconds": _spread([one.sent - one.due for one in records], lambda measured: measured),
        "load_average": seen.load_average,
        "problems": sorted({one.end for one in records if one.lost})[:10],
    }
    report["held"] = _held(report)
    report["series"] = _series(seen, plan, limits)
    report["each"] = [_row(one, seen, plan) for one in records]
    return report


def _held(report: Mapping[str, Any]) -> bool:
    """Whether the machine was fast enough for what was to be simulated."""
    late = report["late_seconds"]
    return (report["step_ratio"] or 1.0) <= SLOW and (late is None or late["p99"] <= LATE_SECONDS)


def _service(records: Sequence[Record], plan: Plan, limits: Limits) -> dict[str, Any]:
    """What users got."""
    return {
        "requests": len(records),
        "ttft_seconds": _spread([one.ttft for one in records], plan.real_seconds),
        "tokens_per_second": _spread([one.rate for one in records], plan.real_rate),
        "late_first_tokens": sum(limits.slow_start(one) for one in records),
        "slow_answers": sum(limits.slow_tokens(one) for one in records),
        "violations": sum(limits.slow_start(one) or limits.slow_tokens(one) for one in records),
    }


def _series(seen: Seen, plan: Plan, limits: Limits) -> dict[str, Any]:
    """Points (seconds from the kill on, value), in the plan's units."""
    zero, seconds = seen.killed, plan.real_seconds
    bins = edges(seen.began - zero, seen.ended - zero, plan.seconds(BIN_SECONDS))
    first = {one.due: one.ttft for one in seen.records}
    workers = sorted({sample.worker for sample in seen.samples})

    def of(worker: str, field: str) -> list[list[float]]:
        points = [
            (seconds(sample.at - zero), float(getattr(sample, field)))
            for sample in seen.samples
            if sample.worker == worker and getattr(sample, field) is not None
        ]
        return [[round(at, 2), value] for at, value in thinned(points, MOST_POINTS)]

    return {
        "ttft": [[round(seconds(due - zero), 2), round(seconds(t), 3)] for due, t in first.items() if t is not None],
        "tokens_per_second": [
            [round(seconds(at), 2), round(plan.real_rate(rate), 2)]
            for at, rate in user_rates(seen.records, bins, zero=zero)
        ],
        "violations": [
            [round(seconds(at), 2), round(share, 3)] for at, share in shares(seen.records, bins, limits, zero=zero)
        ],
        "inflight": {worker: of(worker, "inflight") for worker in workers},
        "waiting": {worker: of(worker, "waiting") for worker in workers},
        "victim": seen.victim,
    }


def _row(one: Record, seen: Seen, plan: Plan) -> list[Any]:
    stall, ttft, rate = one.stall(seen.killed), one.ttft, one.rate
    return [
        round(plan.real_seconds(one.due - seen.killed), 2),
        None if ttft is None else round(plan.real_seconds(ttft), 3),
        None if rate is None else round(plan.real_rate(rate), 2),
        one.resumes,
        one.retries,
        None if stall is None else round(plan.real_seconds(stall), 3),
        one.end,
    ]


EACH: Final = ("due", "ttft", "tokens_per_second", "resumes", "retries", "stall", "end")
"""The columns of ``each``."""


def summarise(plan: Plan, arms: Sequence[Seen], broken: Mapping[str, str]) -> dict[str, Any]:
    """The report."""
    done = {seen.arm: figures(seen, plan) for seen in arms}
    report: dict[str, Any] = {
        "engine": plan.engine,
        "scale": plan.scale,
        "plan": msgspec.to_builtins(plan),
        "reference_seconds": dict(REFERENCE),
        "each_columns": list(EACH),
        "arms": done,
        "broken": dict(broken),
        "lost": sum(arm["lost"] for arm in done.values()),
        "held": all(arm["held"] for arm in done.values()),
    }
    cold, shadow = (done.get(name, {}).get("routable_seconds") for name in ("cold", "shadow"))
    if cold and shadow:
        report["ratio"] = round(cold / shadow, 1)
    carry = done.get("shadow_carry", {}).get("routable_seconds")
    if cold and carry:
        report["carry_ratio"] = round(cold / carry, 1)
    return report


def _real(plan: Plan, moment: float | None, zero: float) -> float | None:
    return None if moment is None else round(plan.real_seconds(moment - zero), 3)


def _spread(values: Sequence[float | None], into: Any) -> dict[str, float] | None:
    found = spread(values)
    return None if found is None else {name: round(into(value), 4) for name, value in found.items()}


def _tokens(plan: Plan, lives: Sequence[Life], field: str) -> int | None:
    return sum(getattr(life, field) for life in lives) * plan.group if lives else None
