"""``GET /metrics``."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from app.admission import AdmissionController
from app.discovery.follower import Discovery
from app.drain import DrainProgress
from app.lifecycle import LifecycleMachine
from app.log_sink import LogSink
from app.metrics import CONTENT_TYPE, GatewayMetrics
from app.realtime_connection import RealtimeSessions
from app.registry import WorkerRegistry


def metrics_router(
    metrics: GatewayMetrics,
    lifecycle: LifecycleMachine,
    admission: AdmissionController,
    registry: WorkerRegistry,
    discovery: Discovery,
    drain: DrainProgress,
    sink: LogSink | None,
    sessions: RealtimeSessions,
) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def read_metrics() -> Response:
        metrics.sessions(sessions.count)
        metrics.look(
            lifecycle=lifecycle.state,
            inflight=admission.inflight,
            drain_stage=drain.stage,
            drain_remaining=drain.remaining(time.monotonic()),
            log_lines_dropped=0 if sink is None else sink.dropped,
            registry=registry,
            discovery=discovery,
        )
        return Response(await metrics.text(), headers={"content-type": CONTENT_TYPE})

    return router
