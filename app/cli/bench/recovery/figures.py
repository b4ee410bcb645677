"""[P] What one kill showed, and the report over all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from app.cli.bench.recovery.arms import Arm

PHASES: Final = ("teardown", "detect", "lock", "map", "bind", "routable", "first_token")
"""Of a promotion, in their order; ``detect`` lies beside the others."""

BEFORE_SECONDS: Final = 5
AFTER_SECONDS: Final = 60
"""Around a kill, in what the picture is drawn from."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One kill. Seconds; what an arm does not have is None."""

    killed: float
    """``time.monotonic()`` of the SIGKILL."""
    recovery: float
    phases: dict[str, float] = {}
    promote: float | None = None
    """``lock`` to ``routable`` in one."""
    redundancy: float | None = None
    parked_private_mib: float | None = None
    weights_copies: float | None = None
    ttft_warm: float | None = None
    ttft_repeat: float | None = None


class Asked(msgspec.Struct, kw_only=True):
    """One streamed answer, for its client; ``time.monotonic()`` seconds."""

    sent: float
    tokens: list[float] = []
    problems: int = 0
    """How often it ended too soon, and was asked for again."""


class Done(msgspec.Struct, kw_only=True):
    """All rounds of one arm under one load."""

    arm: Arm
    load: str
    rounds: list[Round]
    requests: int
    failed_requests: int
    problems: list[str]
    load_average: tuple[float, float]
    """Of the machine over a minute, before and after: this measurement's own processes count, too."""
    asked: list[Asked] = []


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile (the value that so many percent do not exceed), and maximum."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return None

    def percentile(share: float) -> float:
        return there[max(0, math.ceil(share * len(there)) - 1)]

    return {
        "median": round(statistics.median(there), 6),
        "p90": round(percentile(0.9), 6),
        "p99": round(percentile(0.99), 6),
        "max": round(there[-1], 6),
    }


def figures(done: Done) -> dict[str, Any]:
    """One arm's part of the report."""
    rounds = done.rounds
    report: dict[str, Any] = {
        "kills": len(rounds),
        "recovery_seconds": spread([one.recovery for one in rounds]),
        "requests": done.requests,
        "failed_requests": done.failed_requests,
        "load_average": done.load_average,
        "problems": done.problems,
    }
    for name in PHASES:
        if (found := spread([one.phases.get(name) for one in rounds])) is not None:
            report[f"{name}_seconds"] = found
    for name in ("promote", "redundancy", "ttft_warm", "ttft_repeat"):
        if (found := spread([getattr(one, name) for one in rounds])) is not None:
            report[f"{name}_seconds"] = found
    ratios = [one.ttft_repeat / one.ttft_warm for one in rounds if one.ttft_repeat and one.ttft_warm]
    if ratios:
        report["ttft_repeat_ratio"] = round(statistics.median(ratios), 3)
    if done.arm.spare:
        report["weights_copies"] = round(max(one.weights_copies or 0.0 for one in rounds), 6)
        report["parked_private_mib"] = round(max(one.parked_private_mib or 0.0 for one in rounds), 1)
    if done.asked:
        report["timeline"] = timeline(rounds, done.asked)
    return report


def timeline(rounds: Sequence[Round], asked: Sequence[Asked]) -> dict[str, Any]:
    """Tokens of each second around the kill whose recovery is the median, and the time to the first token of each
    request that was sent then; seconds from the kill on, up to the next one."""
    by_recovery = sorted(rounds, key=lambda one: one.recovery)
    shown = by_recovery[(len(rounds) - 1) // 2]
    later = [one.killed for one in rounds if one.killed > shown.killed]
    last = max(token for one in asked for token in [one.sent, *one.tokens])
    until = min([shown.killed + AFTER_SECONDS, *later, last])
    whole = int(until - shown.killed)
    tokens = [token - shown.killed for one in asked for token in one.tokens]
    return {
        "recovery": round(shown.recovery, 4),
        "tokens": [
            [second, sum(second <= token < second + 1 for token in tokens)] for second in range(-BEFORE_SECONDS, whole)
        ],
        "ttft": [
            [round(one.sent - shown.killed, 3), round(one.tokens[0] - one.sent, 4)]
            for one in sorted(asked, key=lambda one: one.sent)
            if one.tokens and -BEFORE_SECONDS <= one.sent - shown.killed < whole
        ],
    }


def summarise(
    engine: str, done: Sequence[Done], skipped: Mapping[str, str], broken: Mapping[str, str]
) -> dict[str, Any]:
    """The report: ``arms`` by name and load. Beside them, of the arms ``shadow`` and ``cold`` under no load, the keys
    that the report had when there were no others; a ratio is one of medians."""
    report: dict[str, Any] = {"engine": engine, "arms": {}, "skipped": dict(skipped), "broken": dict(broken)}
    for one in done:
        report["arms"].setdefault(one.arm.name, {"meaning": one.arm.meaning})[one.load] = figures(one)
    shadow, cold, stock = (report["arms"].get(name, {}).get("none") for name in ("shadow", "cold", "stock"))
    if shadow:
        report["rounds"] = shadow["kills"]
        report |= {
            name: value for name, value in shadow.items() if name.endswith(("_seconds", "_copies", "_mib", "_ratio"))
        }
        median = shadow["recovery_seconds"]["median"]
        report["p99_ratio"] = round(shadow["recovery_seconds"]["p99"] / median, 2)
        if cold:
            report["cold_restart_seconds"] = cold["recovery_seconds"]
            report["ratio"] = round(cold["recovery_seconds"]["median"] / median, 2)
        if stock:
            report["stock_restart_seconds"] = stock["recovery_seconds"]
            report["stock_ratio"] = round(stock["recovery_seconds"]["median"] / median, 2)
    ours = [one for one in done if one.arm.ours]
    report["failed_requests"] = sum(one.failed_requests for one in ours)
    report["requests"] = sum(one.requests for one in ours)
    report["problems"] = [problem for one in ours for problem in one.problems]
    return report
