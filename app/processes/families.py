"""[P] Metrics of several processes as those of one.

Counters and histograms add up, gauges go by a table. What a process counted stays in the sum when it has ended: its
successor carries it on (``siblings``), so that no counter ever goes backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Rule = Literal["sum", "max", "min"]
Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""

_COUNTING = frozenset(("counter", "histogram", "summary"))


class Sample(msgspec.Struct, array_like=True, frozen=True):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """``kind`` is Prometheus's word: counter, gauge, histogram."""

    name: str
    meaning: str
    kind: str
    samples: tuple[Sample, ...]


def counting(families: Iterable[Family]) -> tuple[Family, ...]:
    """What still holds when the process has ended."""
    return tuple(family for family in families if family.kind in _COUNTING)


def merge(processes: Sequence[Iterable[Family]], gauges: Mapping[str, Rule]) -> tuple[Family, ...]:
    """One family of each name, its samples in the order in which they came. A gauge without a rule goes by its
    largest value."""
    found: dict[str, Family] = {}
    values: dict[str, dict[Key, float]] = {}
    for families in processes:
        for family in families:
            found.setdefault(family.name, family)
            merged = values.setdefault(family.name, {})
            rule: Rule = "sum" if family.kind in _COUNTING else gauges.get(family.name, "max")
            for sample in family.samples:
                key = sample.name, sample.labels
                merged[key] = _join(rule, merged[key], sample.value) if key in merged else sample.value
    return tuple(
        Family(name, family.meaning, family.kind, tuple(Sample(*key, value) for key, value in values[name].items()))
        for name, family in found.items()
    )


def _join(rule: Rule, one: float, other: float) -> float:
    match rule:
        case "sum":
            return one + other
        case "max":
            return max(one, other)
        case "min":
            return min(one, other)
