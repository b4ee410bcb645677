"""``GET /metrics``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import Response

from app.admission import AdmissionController
from app.discovery.follower import Discovery
from app.drain import DrainProgress
from app.fleet.registry import WorkerRegistry
from app.lifecycle import LifecycleMachine
from app.processes.siblings import Siblings
from app.realtime.connection import RealtimeSessions
from app.relay.relay import Relay
from app.relay.waiting import WaitQueue
from app.security.tls import ServerTls
from app.telemetry.exposition import CONTENT_TYPE
from app.telemetry.log_sink import LogSink
from app.telemetry.metrics import GatewayMetrics, merged_text


def look_at(
    metrics: GatewayMetrics,
    lifecycle: LifecycleMachine,
    admission: AdmissionController,
    registry: WorkerRegistry,
    discovery: Discovery,
    drain: DrainProgress,
    sink: LogSink | None,
    sessions: RealtimeSessions,
    tls: ServerTls | None,
    queue: WaitQueue,
    relay: Relay,
) -> Callable[[], None]:
    """What brings the metrics up to date, just before they are read."""

    def look() -> None:
        metrics.sessions(sessions.count)
        metrics.look(
            lifecycle=lifecycle.state,
            inflight=admission.inflight,
            queued=queue.waiting,
            kept_bytes=relay.kept_bytes,
            drain_stage=drain.stage,
            drain_remaining=drain.remaining(time.monotonic()),
            log_lines_dropped=0 if sink is None else sink.dropped,
            registry=registry,
            discovery=discovery,
            tls=tls,
        )

    return look


def metrics_router(metrics: GatewayMetrics, look: Callable[[], None], siblings: Siblings | None) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def read_metrics() -> Response:
        if siblings is None:
            look()
            text = await metrics.text()
        else:
            told = {index: (said.families, said.answered) for index, said in (await siblings.metrics()).items()}
            text = await asyncio.to_thread(merged_text, told)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return router
