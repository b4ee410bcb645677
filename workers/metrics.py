"""Prometheus metrics of one engine's process: the only place in ``workers`` that imports prometheus_client."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from workers.contract import Role
from workers.state import ServiceLink

CONTENT_TYPE = CONTENT_TYPE_LATEST

PROMOTION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_role = Gauge("hotspare_engine_role", "1 for the role the engine is in, 0 for the others", ["role"])
_epoch = Gauge("hotspare_engine_epoch", "The promotion this engine serves under, 0 before its first")
_steps = Gauge("hotspare_engine_steps", "Engine steps taken in this engine's life")
_inflight = Gauge("hotspare_engine_inflight_requests", "Requests being answered")
_connected = Gauge(
    "hotspare_engine_memory_service_connected",
    "1 while every pool that the engine holds is the memory service's, 0 while it serves on without",
)
_restores = Gauge(
    "hotspare_engine_memory_service_restores",
    "How often in this engine's life a memory service that started again took its pages back",
)
_private = Gauge("hotspare_engine_private_pools", "Pools that no memory service took back: copies of this engine's own")
_promotions = Counter("hotspare_engine_promotions_total", "Promotions of this engine", ["outcome"])
_phase = Histogram(
    "hotspare_engine_promotion_seconds",
    "Time of one part of a promotion",
    ["phase"],
    buckets=PROMOTION_BUCKETS,
)


def record_role(role: Role) -> None:
    for other in Role:
        _role.labels(other.value).set(other is role)


def record_promotion(outcome: str, phases: dict[str, float]) -> None:
    """``outcome``: promoted or rolled_back; ``phases``: seconds by name."""
    _promotions.labels(outcome).inc()
    for name, seconds in phases.items():
        _phase.labels(name).observe(seconds)


def render(*, epoch: int, steps: int, inflight: int, memory_service: ServiceLink | None) -> bytes:
    """The exposition of everything, the engine's own metrics (vLLM's) included."""
    if memory_service is not None:
        _connected.set(memory_service.connected)
        _restores.set(memory_service.restored)
        _private.set(len(memory_service.private))
    _epoch.set(epoch)
    _steps.set(steps)
    _inflight.set(inflight)
    return generate_latest()
