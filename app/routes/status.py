"""``GET /status``: what the gateway knows, for people and for benchmarks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.admission import AdmissionController
from app.fleet.registry import WorkerRegistry
from app.fleet.replica import WorkerEntry
from app.lifecycle import LifecycleMachine
from app.processes.siblings import Siblings
from app.relay.waiting import WaitQueue


def describe_worker(entry: WorkerEntry, registry: WorkerRegistry, now: float) -> dict[str, object]:
    """One address. Of a worker that is down, what it said last; ``monotonic`` is CLOCK_MONOTONIC seconds, ``unix``
    the wall clock's."""
    current = entry.current
    last = current or entry.last
    line = None if last is None else last.line
    return {
        "address": str(entry.address),
        "worker": line and line.worker,
        "instance": line and line.instance,
        "epoch": line and line.epoch,
        "engine": line and line.engine,
        "state": entry.state(now, registry.heartbeat_timeout).value,
        "routable": current is not None and registry.is_routable(current),
        "reported": line and line.state.value,
        "problem": registry.problem(entry) or None,
        "models": list(line.models) if line else [],
        "inflight": line.inflight if line else 0,
        "capacity": line.capacity if line else 0,
        "standby": line and line.standby and line.standby.value,
        "steps": line.steps if line else 0,
        "kv_usage": line.kv_usage if line else 0.0,
        "history": [
            {"state": item.state.value, "epoch": item.epoch, "monotonic": item.monotonic, "unix": round(item.unix, 3)}
            for item in entry.history
        ],
    }


def describe_gateway(
    lifecycle: LifecycleMachine, admission: AdmissionController, registry: WorkerRegistry, queue: WaitQueue
) -> dict[str, Any]:
    """This process."""
    now = time.monotonic()
    return {
        "pid": os.getpid(),
        "lifecycle": lifecycle.state.value,
        "inflight": admission.inflight,
        "waiting": queue.waiting,
        "workers": [describe_worker(entry, registry, now) for entry in registry.entries.values()],
    }


def describe_all(own: dict[str, Any], told: Mapping[int, bytes]) -> dict[str, Any]:
    """Several processes: workers as this one sees them, and sums of the rest. ``processes`` has those that answer."""
    documents = {index: json.loads(said) for index, said in told.items()}
    counts = {name: sum(document[name] for document in documents.values()) for name in ("inflight", "waiting")}
    each = [
        {"process": index, **{name: document[name] for name in ("pid", "lifecycle", "inflight", "waiting")}}
        for index, document in documents.items()
    ]
    return own | counts | {"processes": each}


def status_router(describe: Callable[[], dict[str, Any]], siblings: Siblings | None) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    async def status() -> JSONResponse:
        own = describe()
        return JSONResponse(own if siblings is None else describe_all(own, await siblings.statuses()))

    return router
