"""Probes. ``/live`` asks whether the process should be restarted, ``/health`` whether it should get traffic."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.discovery.follower import Discovery
from app.drain import DrainProgress, DrainStage
from app.fleet.outages import nobody_for_too_long
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle, LifecycleMachine


def health_router(
    lifecycle: LifecycleMachine,
    registry: WorkerRegistry,
    discovery: Discovery,
    drain: DrainProgress,
    *,
    needs_worker: bool,
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """Ready once the first discovery is done. A gateway without a routable worker stays ready, unless it is told
        otherwise: requests can wait here, and nowhere else. ``discovery`` says what is wrong with it."""
        now = time.monotonic()
        ready = lifecycle.state is Lifecycle.READY
        document: dict[str, object] = {
            "status": lifecycle.state.value,
            "workers": len(registry.entries),
            "routable": len(registry.candidates("")),
        }
        if discovery.problem is not None:
            document["discovery"] = discovery.problem
        since = registry.nobody_since
        if ready and needs_worker and since is not None and nobody_for_too_long(since, now=now):
            ready = False
            document["status"] = "no_worker"
            document["problem"] = (
                f"no worker was routable for {now - since:.0f} s, and HOTSPARE_HEALTH_NEEDS_WORKER is set"
            )
        if drain.stage is not DrainStage.NONE:
            left = drain.remaining(now)
            document["drain"] = {"stage": drain.stage.value, "remaining_seconds": round(left, 3)}
        return JSONResponse(document, status_code=200 if ready else 503)

    @router.get("/live")
    async def live() -> JSONResponse:
        return JSONResponse({"status": lifecycle.state.value}, status_code=200 if lifecycle.live else 503)

    return router
