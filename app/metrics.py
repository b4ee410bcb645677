"""Metrics of the gateway. The only module of ``app`` that knows ``prometheus_client``.

Names start with ``hotspare_``, units are base units, and every label has a bounded set of values: a model counts under
its own name only if a worker serves it.
"""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.lifecycle import Lifecycle
from app.liveness import WorkerState
from app.registry import WorkerRegistry

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """All metric objects of one gateway, in a collector registry of its own."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        own = self.collectors
        self._requests = Counter("hotspare_requests", "Requests answered.", ["route", "model", "status"], registry=own)
        self._duration = Histogram(
            "hotspare_request_duration_seconds",
            "From the request's head to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self._ttft = Histogram(
            "hotspare_time_to_first_byte_seconds",
            "From the request's head to the first event, or to the whole answer if it is not streamed.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
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
        self._inflight = Gauge("hotspare_inflight_requests", "Requests in flight.", registry=own)
        self._waiting = Gauge("hotspare_waiting_requests", "Requests waiting for a worker.", registry=own)
        self._lifecycle = Gauge("hotspare_lifecycle", "1 for the state the gateway is in.", ["state"], registry=own)
        self._state = Gauge(
            "hotspare_worker_state", "1 for the state a worker is in.", ["address", "state"], registry=own
        )
        self._epoch = Gauge("hotspare_worker_epoch", "Latest promotion heard of.", ["address"], registry=own)
        self._routable = Gauge("hotspare_worker_routable", "Whether new requests go there.", ["address"], registry=own)
        self._request_children: dict[tuple[str, str, int], Counter] = {}

    def request(self, *, route: str, model: str, status: int, seconds: float, first_byte_seconds: float | None) -> None:
        key = (route, model, status)
        child = self._request_children.get(key)
        if child is None:
            child = self._request_children[key] = self._requests.labels(route, model, str(status))
        child.inc()
        self._duration.labels(route).observe(seconds)
        if first_byte_seconds is not None:
            self._ttft.labels(route).observe(first_byte_seconds)

    def trouble(self, *, route: str, retries: int, disconnected: bool, error_code: str) -> None:
        if retries:
            self._retries.labels(route).inc(retries)
        if disconnected:
            self._disconnects.labels(route).inc()
        if error_code:
            self._errors.labels(route, error_code).inc()

    def look(self, *, lifecycle: Lifecycle, inflight: int, registry: WorkerRegistry) -> None:
        """Take over what is derived elsewhere, just before it is read."""
        self._inflight.set(inflight)
        self._waiting.set(registry.waiting)
        for stage in Lifecycle:
            self._lifecycle.labels(stage.value).set(stage is lifecycle)
        now = time.monotonic()
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
        return await asyncio.to_thread(generate_latest, self.collectors)
