"""[P] Limits that a scenario can set, and whether a run kept them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

Report = Mapping[str, Any]
Value = Callable[[Report], float | None]


def _of(measure: str, figure: str) -> Value:
    return lambda report: report["all"][f"{measure}_seconds"][figure]


LIMITS: Final[Mapping[str, Value]] = {
    "lost": lambda report: report["lost"],
    "wrong": lambda report: report["wrong"],
    "refused": lambda report: sum(report["refused"].values()),
    "stalls": lambda report: report["all"]["stall_seconds"]["count"],
    "stall_max_seconds": lambda report: report["all"]["stall_seconds"]["max"] or 0.0,
    **{
        f"{measure}_{figure}_seconds": _of(measure, figure)
        for measure in ("ttft", "itl", "total")
        for figure in ("p50", "p95", "p99", "max")
    },
    "late_p99_seconds": lambda report: report["generator"]["late_seconds"]["p99"],
    "tokens_per_second": lambda report: report["all"]["tokens_per_second"],
}
"""Name → what of the report it is held against."""

AT_LEAST: Final = frozenset({"tokens_per_second"})
"""Those that are a least value; all others are a most."""

ALWAYS: Final[Mapping[str, float]] = {"lost": 0, "wrong": 0}
"""Where a scenario does not say otherwise."""


def judged(limits: Mapping[str, float], report: Report) -> list[dict[str, Any]]:
    """Each limit with the value that it was held against. One on what did not occur (no answer had a first token, say)
    is not kept: the run does not show it."""
    found = []
    for name, limit in {**ALWAYS, **limits}.items():
        value = LIMITS[name](report)
        kept = value is not None and (value >= limit if name in AT_LEAST else value <= limit)
        found.append({"name": name, "limit": limit, "value": value, "kept": kept})
    return found
