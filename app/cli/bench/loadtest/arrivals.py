"""When requests arrive: by the scenario's seed alone, and never by what became of others.

One clock ticks at random moments (``poisson``) or evenly (``constant``), on an average once a unit. A phase says how
many units a second has, and the ticks are carried over from phase to phase. So a run with the same seed has the same
arrivals, wherever it runs, and processes that share them each know all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from app.cli.bench.loadtest.scenario import Phase, Scenario


class Arrival(NamedTuple):
    """Request ``number`` is due ``at`` seconds after the beginning, in the phase with that index."""

    number: int
    at: float
    phase: int


def arrivals(scenario: Scenario) -> Iterator[Arrival]:
    """All of them, in order."""
    ticks = _ticks(scenario)
    tick = next(ticks)
    number, began, units = 0, 0.0, 0.0
    for index, phase in enumerate(scenario.phases):
        whole = phase.seconds * (phase.rate + phase.end_rate) / 2
        while tick < units + whole:
            yield Arrival(number, began + _moment(phase, tick - units), index)
            number += 1
            tick = next(ticks)
        units += whole
        began += phase.seconds


def _ticks(scenario: Scenario) -> Iterator[float]:
    chance = random.Random(f"arrivals {scenario.seed}")  # noqa: S311 - not for secrets
    tick = 0.0
    while True:
        if scenario.arrivals == "poisson":
            tick += chance.expovariate(1.0)
        yield tick
        if scenario.arrivals == "constant":
            tick += 1.0


def _moment(phase: Phase, units: float) -> float:
    """When so many units of the phase are over, in seconds since it began: the rate's integral, the other way round."""
    slope = (phase.end_rate - phase.rate) / phase.seconds
    if not units:
        return 0.0
    if not slope:
        return units / phase.rate
    return min(phase.seconds, 2 * units / (phase.rate + math.sqrt(max(0.0, phase.rate**2 + 2 * slope * units))))
