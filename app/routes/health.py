"""Probes. ``/live`` asks whether the process should be restarted, ``/health`` whether it should get traffic."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.discovery.follower import Discovery
from app.drain import DrainProgress, DrainStage
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle, LifecycleMachine


def health_router(
    lifecycle: LifecycleMachine, registry: WorkerRegistry, discovery: Discovery, drain: DrainProgress
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """Ready once the first discovery is done. A gateway without a routable worker stays ready: requests can wait
        here, and nowhere else. ``discovery`` says what is wrong with it."""
        ready = lifecycle.state is Lifecycle.READY
        document: dict[str, object] = {
            "status": lifecycle.state.value,
            "workers": len(registry.entries),
            "routable": len(registry.candidates("")),
        }
        if discovery.problem is not None:
            document["discovery"] = discovery.problem
        if drain.stage is not DrainStage.NONE:
            left = drain.remaining(time.monotonic())
            document["drain"] = {"stage": drain.stage.value, "remaining_seconds": round(left, 3)}
        return JSONResponse(document, status_code=200 if ready else 503)

    @router.get("/live")
    async def live() -> JSONResponse:
        return JSONResponse({"status": lifecycle.state.value}, status_code=200 if lifecycle.live else 503)

    return router
