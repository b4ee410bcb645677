"""Metrics of the gateway. With ``tallies`` and ``exposition`` the only modules of ``app`` that know prometheus_client.

Names start with ``hotspare_``, units are base units, and every label has a bounded set of values: a model counts under
its own name only if a worker serves it. What the process itself uses comes from prometheus_client's own collectors,
under their usual ``process_`` names.

Where several processes are read as one, counters and histograms add up, and gauges go by ``GAUGE_MERGE``.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from app import compiled
from app.discovery.follower import Discovery
from app.drain import DrainStage
from app.fleet.liveness import WorkerState
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle
from app.processes.families import Family, Rule, Sample, merge
from app.security.tls import ServerTls
from app.telemetry.exposition import exposition, families_of
from app.telemetry.interruptions import Interruptions
from app.telemetry.tallies import SECONDS, RequestTallies

_RECOVERY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

GAUGE_MERGE: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "hotspare_build_info": "max",
        "hotspare_discovered_workers": "max",
        "hotspare_discovery_last_success_timestamp_seconds": "min",
        "hotspare_discovery_up": "min",
        "hotspare_drain_remaining_seconds": "max",
        "hotspare_drain_stage": "max",
        "hotspare_client_connections": "sum",
        "hotspare_inflight_requests": "sum",
        "hotspare_lifecycle": "max",
        "hotspare_realtime_sessions": "sum",
        "hotspare_tls_certificate_expiry_timestamp_seconds": "min",
        "hotspare_queued_requests": "sum",
        "hotspare_resume_kept_bytes": "sum",
        "hotspare_worker_epoch": "max",
        "hotspare_worker_routable": "max",
        "hotspare_worker_state": "max",
        "process_max_fds": "sum",
        "process_open_fds": "sum",
        "process_resident_memory_bytes": "sum",
        "process_start_time_seconds": "min",
        "process_virtual_memory_bytes": "sum",
    }
)
"""How the gauges of several processes become one. A lifecycle or worker state that any process is in shows as 1."""


class GatewayMetrics:
    """All metric objects of one gateway, in a collector registry of its own."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        own = self.collectors
        ProcessCollector(registry=own)
        self._tallies = RequestTallies()
        own.register(self._tallies)
        self.request = self._tallies.request
        self._retries = Counter(
            "hotspare_retries", "Times a request ran again because its worker broke.", ["route"], registry=own
        )
        self._disconnects = Counter(
            "hotspare_client_disconnects",
            "Clients that left before their answer was complete.",
            ["route"],
            registry=own,
        )
        self._errors = Counter(
            "hotspare_gateway_errors", "Errors that the gateway itself reported.", ["route", "code"], registry=own
        )
        self._connections = Gauge("hotspare_client_connections", "Connections of clients.", registry=own)
        self._connections_refused = Counter(
            "hotspare_refused_connections", "Connections of clients beyond the limit.", registry=own
        )
        self._inflight = Gauge("hotspare_inflight_requests", "Requests in flight.", registry=own)
        self._queued = Gauge("hotspare_queued_requests", "Requests in line for a worker.", registry=own)
        self.interruptions = Interruptions(own)
        self._kept = Gauge(
            "hotspare_resume_kept_bytes",
            "Bodies and notes that are kept so that requests can be started again and resumed.",
            registry=own,
        )
        self._queue_wait = Histogram(
            "hotspare_queue_wait_seconds",
            "How long requests stood in line for a worker, of those that did.",
            buckets=SECONDS,
            registry=own,
        )
        self._recovery = Histogram(
            "hotspare_recovery_seconds",
            "Parts of what follows the death of a worker's engine, as far as this gateway sees it.",
            ["phase"],
            buckets=_RECOVERY_SECONDS,
            registry=own,
        )
        self._refused = Counter(
            "hotspare_refused_requests", "Requests that there was no room for, by reason.", ["reason"], registry=own
        )
        self._sessions = Gauge("hotspare_realtime_sessions", "Realtime sessions that are open.", registry=own)
        self._lifecycle = Gauge("hotspare_lifecycle", "1 for the state the gateway is in.", ["state"], registry=own)
        self._state = Gauge(
            "hotspare_worker_state", "1 for the state a worker is in.", ["address", "state"], registry=own
        )
        self._epoch = Gauge("hotspare_worker_epoch", "Latest promotion heard of.", ["address"], registry=own)
        self._routable = Gauge("hotspare_worker_routable", "Whether new requests go there.", ["address"], registry=own)
        self._drain_remaining = Gauge(
            "hotspare_drain_remaining_seconds", "Time left to a drain that runs; 0 without one.", registry=own
        )
        self._drain_stage = Gauge("hotspare_drain_stage", "1 for the stage of the drain.", ["stage"], registry=own)
        self._drain_cut = Counter(
            "hotspare_drain_cut_requests", "Requests ended because the drain's time was over.", registry=own
        )
        self._log_dropped = Counter(
            "hotspare_log_lines_dropped", "Log lines that could not be written in time.", registry=own
        )
        self._log_dropped_before = 0
        self._lag = Histogram(
            "hotspare_event_loop_lag_seconds",
            "How late a timer of the event loop was, asked four times a second.",
            buckets=_LAG_SECONDS,
            registry=own,
        )
        build = Gauge("hotspare_build_info", "1, with what runs here.", ["version", "python", "compiled"], registry=own)
        self.version = _version()
        self._spans = Counter(
            "hotspare_spans", "Spans of the traces that were sent, or lost.", ["outcome"], registry=own
        )
        build.labels(self.version, platform.python_version(), str(compiled.used()).lower()).set(1)
        self._discovery_up = Gauge(
            "hotspare_discovery_up", "Whether the source of worker addresses works.", registry=own
        )
        self._discovery_at = Gauge(
            "hotspare_discovery_last_success_timestamp_seconds",
            "When the source last gave a list; Unix time, 0: never.",
            registry=own,
        )
        self._discovered = Gauge("hotspare_discovered_workers", "Addresses of workers in use.", registry=own)
        self._certificate = Gauge(
            "hotspare_tls_certificate_expiry_timestamp_seconds",
            "Until when the certificate that clients are shown is valid; Unix time.",
            ["certificate"],  # without TLS there is none, and no date to be alarmed about
            registry=own,
        )
        self._shown: set[str] = set()
        """Addresses that have series."""

    def trouble(self, *, route: str, retries: int, disconnected: bool, error_code: str) -> None:
        if retries:
            self._retries.labels(route).inc(retries)
        if disconnected:
            self._disconnects.labels(route).inc()
        if error_code:
            self._errors.labels(route, error_code).inc()

    def unrouted_error(self, code: str) -> None:
        """An error outside the relayed routes: what a client sent was no request, not one that is taken, or for
        another route."""
        self._errors.labels("", code).inc()

    def connection_refused(self) -> None:
        self._connections_refused.inc()

    def count_connections(self, count: Callable[[], int]) -> None:
        """Who is asked how many there are, whenever somebody wants to know."""
        self._connections.set_function(count)

    def sessions(self, count: int) -> None:
        self._sessions.set(count)

    def loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def spans(self, outcome: str, number: int) -> None:
        """Called from any thread. ``outcome``: exported or failed."""
        self._spans.labels(outcome).inc(number)

    def drain_cut(self, requests: int) -> None:
        self._drain_cut.inc(requests)

    def waited(self, seconds: float) -> None:
        self._queue_wait.observe(seconds)

    def recovered(self, phase: str, seconds: float) -> None:
        self._recovery.labels(phase).observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def look(
        self,
        *,
        lifecycle: Lifecycle,
        inflight: int,
        queued: int,
        kept_bytes: int,
        drain_stage: DrainStage,
        drain_remaining: float,
        log_lines_dropped: int,
        registry: WorkerRegistry,
        discovery: Discovery,
        tls: ServerTls | None = None,
    ) -> None:
        """Take over what is derived elsewhere, just before it is read."""
        self._log_dropped.inc(log_lines_dropped - self._log_dropped_before)
        self._log_dropped_before = log_lines_dropped
        self._drain_remaining.set(drain_remaining)
        for step in DrainStage:
            self._drain_stage.labels(step.value).set(step is drain_stage)
        self._inflight.set(inflight)
        self._queued.set(queued)
        self._kept.set(kept_bytes)
        for stage in Lifecycle:
            self._lifecycle.labels(stage.value).set(stage is lifecycle)
        self._discovery_up.set(discovery.up)
        self._discovery_at.set(discovery.picture.succeeded_at)
        self._discovered.set(len(registry.entries))
        if tls is not None:
            self._certificate.labels(str(tls.certificate)).set(tls.expires_at)
        self._look_at_workers(registry)

    def _look_at_workers(self, registry: WorkerRegistry) -> None:
        now = time.monotonic()
        addresses = {str(address) for address in registry.entries}
        for address in self._shown - addresses:
            for state in WorkerState:
                self._state.remove(address, state.value)
            for gauge in (self._epoch, self._routable):
                with contextlib.suppress(KeyError):  # an epoch was never heard of
                    gauge.remove(address)
        self._shown = addresses
        for entry in registry.entries.values():
            address = str(entry.address)
            current = entry.current
            worker_state = entry.state(now, registry.heartbeat_timeout)
            for state in WorkerState:
                self._state.labels(address, state.value).set(state is worker_state)
            last = current or entry.last
            if last is not None:
                self._epoch.labels(address).set(last.key.epoch)
            self._routable.labels(address).set(current is not None and registry.is_routable(current))

    async def text(self) -> bytes:
        """The exposition, made in a thread: with many series it takes longer than a loop turn should."""
        return await asyncio.to_thread(lambda: exposition(self.families()))

    def families(self) -> tuple[Family, ...]:
        """The values of now."""
        return families_of(self.collectors)


def merged_text(processes: Mapping[int, tuple[tuple[Family, ...], bool]]) -> bytes:
    """The exposition of several processes: index → families, and whether it answered."""
    alive = Family(
        "hotspare_process_up",
        "Whether this process of the gateway told its metrics just now.",
        "gauge",
        tuple(
            Sample("hotspare_process_up", (("process", str(index)),), float(up)) for index, (_, up) in processes.items()
        ),
    )
    merged = merge([families for families, _ in processes.values()], GAUGE_MERGE)
    return exposition((*merged, alive))


def _version() -> str:
    try:
        return version("hotspare")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
