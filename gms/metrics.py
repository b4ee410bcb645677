"""The service's Prometheus metrics, and whether it lives; served from threads of their own, so that no scrape ever
holds up a promotion.

``/live`` asks the service's loop for its status, as a client would be answered, and waits for that with a deadline: the
threads here would go on answering while nobody else is answered any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections import Counter as Counter_
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import ThreadingHTTPServer
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from gms.protocol import Status

ATTACH_BUCKETS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
SNAPSHOT_SECONDS: Final = 2.0
"""How long the loop may take to tell its status to a scrape."""
LIVE_SECONDS: Final = 2.0
"""The same, for a probe: below the time that whoever probes is usually told to wait."""
LIVE_PATH: Final = "/live"
MAX_SCRAPES: Final = 8
"""At a time; more are turned away."""
SCRAPE_SECONDS: Final = 5.0
"""How long a scraper may be silent."""

log: Final = logging.getLogger("gms")


class Closeable(Protocol):
    def shutdown(self) -> None: ...
    def server_close(self) -> None: ...


class LoopSilent(Exception):
    """The service's loop did not answer in time, or ends."""


class Asker:
    """Asks the service for its status from other threads than its own."""

    def __init__(self, status: Callable[[], Status], loop: asyncio.AbstractEventLoop) -> None:
        self._status = status
        self._loop = loop

    def ask(self, seconds: float) -> Status:
        """Raises LoopSilent."""

        async def snapshot() -> Status:
            return self._status()

        question = snapshot()
        try:
            pending = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:  # the loop was closed a moment ago
            question.close()
            raise LoopSilent("the service has ended") from error
        try:
            return pending.result(seconds)
        except FutureTimeoutError as error:
            pending.cancel()
            raise LoopSilent(f"the service's loop did not answer within {seconds:g} s") from error
        except FutureCancelled as error:
            raise LoopSilent("the service ends") from error


class StatusCollector(Collector):
    """Gauges read from the service's status at the moment of the scrape: nothing is stored twice."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: else the registry would collect once at registration, on the loop's own thread."""
        return ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        try:
            status = self._asker.ask(SNAPSHOT_SECONDS)
        except LoopSilent as error:
            log.warning("a scrape goes without the service's status: %s", error)
            return
        pool_bytes = GaugeMetricFamily("hotspare_gms_pool_bytes", "Bytes allocated, by pool.", labels=["pool"])
        orphaned = GaugeMetricFamily(
            "hotspare_gms_orphaned_bytes",
            "Bytes that only wait for a former holder's death.",
            labels=["pool"],
        )
        leases = GaugeMetricFamily("hotspare_gms_leases", "Live leases, by pool and mode.", labels=["pool", "mode"])
        waits = GaugeMetricFamily("hotspare_gms_waiting", "Clients waiting for a lease, by pool.", labels=["pool"])
        high = GaugeMetricFamily(
            "hotspare_gms_pool_high_water_bytes", "The most bytes ever allocated at a time, by pool.", labels=["pool"]
        )
        owners = GaugeMetricFamily(
            "hotspare_gms_owner_bytes", "Bytes allocated, by the client that asked for them.", labels=["owner"]
        )
        states = GaugeMetricFamily("hotspare_gms_pool_state", "1 for the state of a pool.", labels=["pool", "state"])
        corrupt = GaugeMetricFamily("hotspare_gms_pool_corrupt", "1 if a pool's content is refused.", labels=["pool"])
        room = GaugeMetricFamily("hotspare_gms_memory_waiting", "Clients waiting for memory.")
        total = GaugeMetricFamily("hotspare_gms_high_water_bytes", "The most bytes ever allocated at a time.")
        journal = GaugeMetricFamily(
            "hotspare_gms_journal_ok", "1 if pages could be taken back after a restart, as far as the journal goes."
        )
        clients = GaugeMetricFamily("hotspare_gms_clients", "Clients connected, or gone and still to be proved dead.")
        limit = GaugeMetricFamily("hotspare_gms_memory_limit_bytes", "The memory limit; 0 for none.")
        for pool in status.pools:
            pool_bytes.add_metric([pool.name], pool.bytes)
            orphaned.add_metric([pool.name], pool.orphaned_bytes)
            waits.add_metric([pool.name], pool.waiting)
            high.add_metric([pool.name], pool.high_water_bytes)
            states.add_metric([pool.name, pool.state], 1)
            corrupt.add_metric([pool.name], bool(pool.corrupt))
            for mode in ("rw", "ro"):
                leases.add_metric([pool.name, mode], sum(lease.mode == mode for lease in pool.leases))
        clients.add_metric([], status.clients)
        limit.add_metric([], status.memory_limit or 0)
        room.add_metric([], len(status.memory_waits))
        total.add_metric([], status.high_water_bytes)
        journal.add_metric([], not status.journal)
        for owner, size in _by_kind(status.bytes_by_owner).items():
            owners.add_metric([owner], size)
        yield from (pool_bytes, high, orphaned, leases, states, corrupt, waits, room, owners, clients, limit, total)
        yield journal


class Metrics:
    """An Observer of the service, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._attach = Histogram(
            "hotspare_gms_attach_seconds", "From asking for a lease to its grant, waiting included.", ["pool", "mode"],
            buckets=ATTACH_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._allocate = Histogram(
            "hotspare_gms_allocate_seconds", "Filling new pages.", ["pool"],
            buckets=ATTACH_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._refused = Counter(
            "hotspare_gms_refused_total", "Leases refused, by error code.", ["code"], registry=self.registry
        )

        self._hash = Histogram(
            "hotspare_gms_hash_seconds", "Hashing one allocation.", buckets=ATTACH_BUCKETS, registry=self.registry
        )
        self._hashed_bytes = Counter("hotspare_gms_hashed_bytes_total", "Bytes hashed.", registry=self.registry)
        self._handed_back = Histogram(
            "hotspare_gms_hand_back_seconds", "Taking pages back after a restart, by outcome.", ["pool", "outcome"],
            buckets=ATTACH_BUCKETS, registry=self.registry,
        )  # fmt: skip

    def attached(self, pool: str, mode: str, seconds: float) -> None:
        self._attach.labels(_kind(pool), mode).observe(seconds)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def allocated(self, pool: str, size_bytes: int, seconds: float) -> None:
        self._allocate.labels(_kind(pool)).observe(seconds)

    def hashed(self, size_bytes: int, seconds: float) -> None:
        self._hash.observe(seconds)
        self._hashed_bytes.inc(size_bytes)

    def handed_back(self, pool: str, outcome: str, seconds: float) -> None:
        self._handed_back.labels(_kind(pool), outcome).observe(seconds)

    def serve(self, host: str, port: int, status: Callable[[], Status], loop: asyncio.AbstractEventLoop) -> Closeable:
        """Serves /metrics and /live. Raises OSError if the port cannot be had."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when a series began: nobody asks, and it is a third of them
        asker = Asker(status, loop)
        self.registry.register(StatusCollector(asker))
        server = _Exporter(host, port, self.registry, asker)
        threading.Thread(target=server.serve_forever, name="gms-metrics", daemon=True).start()
        return server


class _Exporter(ThreadingHTTPServer):
    """prometheus_client's handler, for few scrapes at a time: whoever can reach the port can open connections, and the
    service needs its descriptors and threads for its clients."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, asker: Asker) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__((host, port), _handler(registry, asker))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hung up or said nothing is not worth a traceback."""
        log.debug("a scrape failed", exc_info=True)


def _handler(registry: CollectorRegistry, asker: Asker) -> type[MetricsHandler]:
    """prometheus_client's, which answers /live beside the metrics."""

    class Handler(MetricsHandler.factory(registry)):  # type: ignore[misc]  # a class that is made at run time
        timeout = SCRAPE_SECONDS

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != LIVE_PATH:
                super().do_GET()
                return
            try:
                told = asker.ask(LIVE_SECONDS)
                status, document = 200, {"status": "live", "device": told.device, "clients": told.clients}
            except LoopSilent as error:
                log.warning("asked whether it lives: %s", error)
                status, document = 503, {"status": "hung", "reason": str(error)}
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _kind(pool: str) -> str:
    """Layout keys would make a new time series for every model."""
    return pool.partition("/")[0]


def _by_kind(bytes_by_owner: Mapping[str, int]) -> dict[str, int]:
    """Owners without their pids, of which each restart has another."""
    sums: Counter_[str] = Counter_()
    for owner, size in bytes_by_owner.items():
        sums[owner.partition(" (")[0]] += size
    return dict(sums)
