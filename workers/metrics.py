"""Prometheus metrics of one engine's process: the only place in ``workers`` that imports prometheus_client.

Gauges are this engine's. Counters and histograms are those of all engines with its name in the life of the pod: they
stand in a file (``keep_in``) and go on where the engine before was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from workers.contract import Role
from workers.kept import Book, Store
from workers.ledger import LIVES, PID
from workers.state import ServiceLink

CONTENT_TYPE = CONTENT_TYPE_LATEST

PROMOTION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_kept = Book()
Counter, Histogram = _kept.counter, _kept.histogram

_role = Gauge("hotspare_engine_role", "1 for the role the engine is in, 0 for the others", ["role"])
_epoch = Gauge("hotspare_engine_epoch", "The promotion this engine serves under, 0 before its first")
_steps = Gauge("hotspare_engine_steps", "Engine steps taken in this engine's life")
_inflight = Gauge("hotspare_engine_inflight_requests", "Requests being answered")
_promotions = Counter("hotspare_engine_promotions_total", "Promotions of this engine", ["outcome"])
_failed_promotions = Counter(
    "hotspare_engine_failed_promotions_total", "Promotions of this engine that failed and were rolled back", ["cause"]
)
_failed_in_a_row = Gauge(
    "hotspare_engine_failed_promotions_in_a_row", "Promotions that failed since the last one that succeeded"
)
_recovery = Histogram(
    "hotspare_engine_recovery_seconds",
    "Time of one part of what follows a death, as far as engine and keeper see it",
    ["phase"],
    buckets=PROMOTION_BUCKETS,
)
_transitions = Counter("hotspare_engine_transitions_total", "Changes of role", ["before", "after"])
_role_seconds = Counter("hotspare_engine_role_seconds_total", "Time spent in each role", ["role"])
_in_role = Gauge("hotspare_engine_in_role_seconds", "How long the engine has been in its role")
_deaths = Counter("hotspare_engine_deaths_total", "Ends of engines that nobody had asked for", ["how"])
_spare = Gauge("hotspare_engine_spare", "1 while this engine is parked and may be counted on, else 0")
_self_tests = Counter("hotspare_engine_self_tests_total", "Self-tests of this engine while it was parked", ["outcome"])
_self_test_seconds = Histogram(
    "hotspare_engine_self_test_seconds", "Time of a self-test that was passed", buckets=PROMOTION_BUCKETS
)
_handovers = Counter("hotspare_engine_handovers_total", "Hand-overs to a spare that this engine began", ["outcome"])
_handover_stage = Histogram(
    "hotspare_engine_handover_seconds",
    "Time of one stage of a hand-over, in the engine that leaves",
    ["stage"],
    buckets=PROMOTION_BUCKETS,
)
_draining = Gauge(
    "hotspare_engine_draining_requests", "Requests that an engine which was told to go still answers", ["route"]
)
_carried_blocks = Counter(
    "hotspare_engine_kv_blocks_taken_over_total", "KV blocks whose content promotions took over from the engine before"
)
_carry_overs = Counter(
    "hotspare_engine_kv_carry_overs_total",
    "Promotions by what became of the prefix cache: taken_over, or why it starts empty",
    ["outcome"],
)
_resumes = Counter(
    "hotspare_engine_resumes_total", "Answers of other engines that this one was asked to go on with", ["outcome"]
)
_replayed_tokens = Counter("hotspare_engine_replayed_tokens_total", "Tokens of other engines in answers gone on with")


class _MemoryService(Collector):
    """How the engine stands with the memory service. Where it has none, or is not started yet, there is nothing to be
    said: a 0 would be the same as a service that is gone."""

    def __init__(self) -> None:
        self.link: ServiceLink | None = None

    def collect(self) -> Iterator[Metric]:
        link = self.link
        if link is None:
            return
        yield GaugeMetricFamily(
            "hotspare_engine_memory_service_connected",
            "1 while every pool that the engine holds is the memory service's, 0 while it serves on without",
            value=link.connected,
        )
        yield GaugeMetricFamily(
            "hotspare_engine_memory_service_restores",
            "How often in this engine's life a memory service that started again took its pages back",
            value=link.restored,
        )
        yield GaugeMetricFamily(
            "hotspare_engine_private_pools",
            "Pools that no memory service took back: copies of this engine's own",
            value=len(link.private),
        )


_memory_service = _MemoryService()
REGISTRY.register(_memory_service)


class _KeptFamilies(Collector):
    """What the book has, in the client's terms."""

    def collect(self) -> Iterator[Metric]:
        values = _kept.store.values()
        for counter in _kept.counters:
            counted = CounterMetricFamily(counter.name, counter.documentation, labels=counter.labelnames)
            for labels, value in counter.samples(values):
                counted.add_metric(labels, value)
            yield counted
        for histogram in _kept.histograms:
            observed = HistogramMetricFamily(histogram.name, histogram.documentation, labels=histogram.labelnames)
            for labels, seen in histogram.samples(values):
                observed.add_metric(labels, buckets=list(seen.buckets), sum_value=seen.sum)
            yield observed


REGISTRY.register(_KeptFamilies())


class _RoleClock:
    """How long the engine has been in its role, and from when on that is not counted yet.

    Both also stand in the store, for whoever outlives this engine. What was told stays told: time is counted before
    anybody hears of it."""

    _ROLE, _COUNTED = "role", "role_counted_until"

    def __init__(self) -> None:
        self._role: Role | None = None
        self._since = 0.0

    def enter(self, role: Role, now: float) -> None:
        self.count(now)
        if self._role is not None:
            _transitions.labels(self._role.value, role.value).inc()
        self._role, self._since = role, now
        _kept.store.put(self._ROLE, float(tuple(Role).index(role)))
        _kept.store.put(self._COUNTED, now)

    def count(self, now: float) -> None:
        if self._role is not None:
            self._until(self._role, now)
            _in_role.set(now - self._since)

    def count_dead(self, now: float) -> None:
        """The keeper's: the engine that the store speaks of is gone since now."""
        values = _kept.store.values()
        if self._ROLE in values and values.get(self._COUNTED, 0.0):
            self._until(tuple(Role)[int(values[self._ROLE])], now)
            _kept.store.put(self._COUNTED, 0.0)

    def _until(self, role: Role, now: float) -> None:
        counted = _kept.store.values().get(self._COUNTED, 0.0)
        if 0.0 < counted < now:
            _kept.store.put(self._COUNTED, now)
            _role_seconds.labels(role.value).inc(now - counted)


_role_clock = _RoleClock()


def keep_in(store: Store) -> None:
    """Counters and histograms stand there from now on, with what they had before."""
    _kept.keep_in(store)


def count_life() -> int:
    """By the process of an engine that begins: how many have begun under its name before it, in its pod's life."""
    before = int(_kept.store.values().get(LIVES, 0.0))
    _kept.store.add(LIVES, 1.0)
    _kept.store.put(PID, float(os.getpid()))
    return before


def lives() -> int:
    """How many engines have begun under this one's name in its pod's life, this one included."""
    return int(_kept.store.values().get(LIVES, 0.0))


def record_role(role: Role) -> None:
    for other in Role:
        _role.labels(other.value).set(other is role)
    _role_clock.enter(role, time.monotonic())


def record_end(how: str | None, *, at: float, teardown: float | None = None) -> None:
    """By the keeper, of an engine that it has forked: that it is gone since ``at``, how if nobody had asked for it
    (``signal_9``, ``exit_1``, or why it was taken for stuck), and how long it took to be gone if the keeper killed it.
    Seconds, ``at`` of the monotonic clock."""
    _role_clock.count_dead(at)
    if how is not None:
        _deaths.labels(how).inc()
    if teardown is not None:
        _recovery.labels("teardown").observe(teardown)


def record_promotion(outcome: str, phases: dict[str, float]) -> None:
    """``outcome``: promoted or rolled_back; ``phases``: seconds by name."""
    _promotions.labels(outcome).inc()
    for name, seconds in phases.items():
        record_phase(name, seconds)


def record_phase(phase: str, seconds: float) -> None:
    """A part of a promotion."""
    _recovery.labels(phase).observe(seconds)


def record_self_test(seconds: float | None) -> None:
    """``seconds``: how long it took; None: it was not passed."""
    _self_tests.labels("failed" if seconds is None else "passed").inc()
    if seconds is not None:
        _self_test_seconds.observe(seconds)


def record_handover(outcome: str) -> None:
    """``outcome``: an end of ``workers.handover.Stage``."""
    _handovers.labels(outcome).inc()


def record_handover_stage(stage: str, seconds: float) -> None:
    """``stage``: one of ``workers.handover.Stage``."""
    _handover_stage.labels(stage).observe(seconds)


def record_draining(requests: Mapping[str, int]) -> None:
    """How many requests by route group a drain has left."""
    _draining.clear()
    for route, count in requests.items():
        _draining.labels(route).set(count)


def record_carry_over(outcome: str, *, blocks: int = 0) -> None:
    """``outcome``: taken_over, or why not (``workers.kv_index.Refusal``)."""
    _carry_overs.labels(outcome).inc()
    _carried_blocks.inc(blocks)


def record_failed_promotion(cause: str, *, in_a_row: int) -> None:
    """``cause``: of ``workers.failed_wake.Cause``."""
    _failed_promotions.labels(cause).inc()
    _failed_in_a_row.set(in_a_row)


def record_promotions_succeed() -> None:
    """Whatever was in the way is gone."""
    _failed_in_a_row.set(0)


def record_resume(outcome: str, *, tokens: int = 0) -> None:
    """``outcome``: taken, or why it was refused (``workers.recorder.Cause``)."""
    _resumes.labels(outcome).inc()
    _replayed_tokens.inc(tokens)


def render(*, epoch: int, steps: int, inflight: int, spare: bool, memory_service: ServiceLink | None) -> bytes:
    """The exposition of everything, the engine's own metrics (vLLM's) included."""
    _memory_service.link = memory_service
    _role_clock.count(time.monotonic())
    _epoch.set(epoch)
    _steps.set(steps)
    _inflight.set(inflight)
    _spare.set(spare)
    return generate_latest()
