"""Builds the gateway: the only place where its parts are put together."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from app.access import Access
from app.admission import AdmissionController
from app.application import Gateway, GatewayApp, install_errors
from app.clients.connections import Connections, room_within
from app.clients.cors import Cors
from app.clients.direct import DirectEndpoint
from app.discovery.follower import Discovery
from app.discovery.kubernetes import KubernetesSource
from app.discovery.sources import DnsSource, FileSource, Source, StaticSource
from app.drain import DrainProgress
from app.fleet.registry import WorkerRegistry
from app.fleet.routing import RoundRobinRouter
from app.intake.accounts import Accounts
from app.intake.arrival import Intake
from app.intake.decoders import Decoders
from app.intake.request_ids import RequestIds
from app.intake.uploads import Uploads
from app.lifecycle import Lifecycle, LifecycleEvent, LifecycleMachine
from app.openai.surface import RELAY_ROUTES
from app.processes.siblings import Place, Siblings
from app.realtime.connection import RealtimeSessions
from app.realtime.session import RealtimeLimits
from app.relay.deadlines import BREAKS_WITHOUT_RESUME, RETURNING_SECONDS, RelayLimits
from app.relay.kept import KeepLimits
from app.relay.relay import Relay
from app.relay.waiting import WaitQueue
from app.routes.docs import docs_router
from app.routes.health import health_router
from app.routes.metrics import look_at, metrics_router
from app.routes.openai import RelayEndpoint, models_router
from app.routes.realtime import RealtimeEndpoint, realtime_router
from app.routes.status import describe_gateway, status_router
from app.settings import GatewaySettings
from app.start_error import StartError
from app.telemetry.access_log import AccessLog
from app.telemetry.log_sink import LogSink
from app.telemetry.loop_lag import LoopLag
from app.telemetry.metrics import GatewayMetrics
from app.telemetry.open_files import OpenFiles
from app.telemetry.outage_log import OutageLog

if TYPE_CHECKING:
    from app.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)


def create_app(
    settings: GatewaySettings, sink: LogSink | None = None, place: Place | None = None, *, files: int = sys.maxsize
) -> GatewayApp:
    """``sink``: where the access log goes; without one there is none. ``place``: this is one of several processes.
    ``files``: how many this process may have open.

    Raises:
        StartError: a file that a setting names cannot be used.
    """
    access = Access(settings)
    lifecycle = LifecycleMachine(_log_lifecycle)
    metrics = GatewayMetrics()
    ids = RequestIds()
    registry = WorkerRegistry(
        connect_timeout=settings.connect_timeout_seconds,
        heartbeat_timeout=settings.heartbeat_timeout_seconds,
        token=access.worker_token,
        resumes_per_second=settings.resumes_per_second,
        # Without a line there is nowhere to wait for those that come back.
        returning_seconds=RETURNING_SECONDS if settings.resume_limit and settings.max_queued else 0.0,
    )
    registry.on_recovery = metrics.recovered
    discovery = Discovery(_source(settings), registry, on_discovered=lambda: _discovered(lifecycle))
    queue = WaitQueue(registry, limit=settings.max_queued)
    admission = AdmissionController(lifecycle, limit=settings.max_inflight, per_second=queue.per_second)
    relay = Relay(
        registry=registry,
        router=RoundRobinRouter(),
        token=access.worker_token,
        queue=queue,
        events=metrics.interruptions,
        limits=RelayLimits(
            wait_for_worker=settings.wait_for_worker_seconds,
            first_byte=settings.first_byte_timeout_seconds or math.inf,
            stall=settings.stall_timeout_seconds or math.inf,
            keepalive=settings.sse_keepalive_seconds,
            resume_wait=settings.resume_wait_seconds,
            home=settings.resume_home_seconds,
            breaks=settings.resume_limit + 1 if settings.resume_limit else BREAKS_WITHOUT_RESUME,
            resumes=settings.resume_limit > 0,
            keep=KeepLimits(body_bytes=settings.resume_body_bytes, tokens=settings.resume_max_tokens),
            max_held_bytes=settings.max_held_bytes,
        ),
    )
    tracing = _tracing(settings, metrics)
    decoders = Decoders()
    intake = Intake(
        admission=admission,
        relay=relay,
        accounts=Accounts(metrics=metrics, registry=registry, access_log=_access_log(settings, sink)),
        ids=ids,
        uploads=Uploads(stall_seconds=settings.body_stall_timeout_seconds),
        decoders=decoders,
        max_body_bytes=settings.max_body_bytes,
        keys=access.keys,
        tracing=tracing,
    )

    drain = DrainProgress()
    sessions = RealtimeSessions(lifecycle, limit=settings.max_realtime_sessions)
    look = look_at(metrics, lifecycle, admission, registry, discovery, drain, sink, sessions, access.tls, queue, relay)

    def describe() -> dict[str, Any]:
        return describe_gateway(lifecycle, admission, registry, queue)

    siblings = None
    if place is not None:
        siblings = Siblings(place, look=look, families=metrics.families, status=lambda: json.dumps(describe()).encode())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            tracing or nullcontext(),
            access.followed(),
            registry,
            discovery,
            LoopLag(metrics.loop_lag),
            OpenFiles(),
            OutageLog(
                registry,
                lifecycle,
                wait_seconds=settings.wait_for_worker_seconds,
                resume_wait_seconds=settings.resume_wait_seconds if settings.resume_limit else None,
                health_needs_worker=settings.health_needs_worker,
            ),
            siblings or nullcontext(),
        ):
            with decoders:
                yield

    app = GatewayApp(
        title="Hotspare gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.gateway = Gateway(
        settings=settings,
        access=access,
        lifecycle=lifecycle,
        admission=admission,
        registry=registry,
        discovery=discovery,
        relay=relay,
        queue=queue,
        intake=intake,
        metrics=metrics,
        drain=drain,
        sessions=sessions,
    )
    app.ids = ids
    app.keys = access.keys
    app.cors = _cors(settings)
    app.connections = _connections(settings, metrics, files, place)
    metrics.count_connections(lambda: app.connections.open)
    app.realtime = RealtimeEndpoint(
        intake,
        sessions,
        registry,
        ids,
        access.keys,
        limits=RealtimeLimits(
            event_bytes=settings.max_realtime_event_bytes,
            conversation_bytes=settings.max_realtime_conversation_bytes,
        ),
        write_timeout=settings.client_write_timeout_seconds,
    )
    app.endpoints = {
        path: RelayEndpoint(
            route,
            intake,
            body_timeout_seconds=settings.body_timeout_seconds,
            write_timeout_seconds=settings.client_write_timeout_seconds,
        )
        for path, route in RELAY_ROUTES.items()
    }
    app.direct = {
        path.encode(): DirectEndpoint(
            route,
            intake,
            body_timeout=settings.body_timeout_seconds,
            write_timeout=settings.client_write_timeout_seconds,
        )
        for path, route in RELAY_ROUTES.items()
    }
    app.include_router(health_router(lifecycle, registry, discovery, drain, needs_worker=settings.health_needs_worker))
    app.include_router(models_router(registry, created=int(time.time())))
    app.include_router(docs_router(version=metrics.version, authenticated=access.keys is not None))
    app.include_router(status_router(describe, siblings))
    app.include_router(metrics_router(metrics, look, siblings))
    app.include_router(realtime_router())
    install_errors(app)
    return app


def _source(settings: GatewaySettings) -> Source:
    """Settings name one at most."""
    if settings.workers_file is not None:
        return FileSource(settings.workers_file)
    if settings.workers_dns is not None:
        return DnsSource(settings.workers_dns, interval_seconds=settings.discovery_interval_seconds)
    if settings.workers_kubernetes is not None:
        return KubernetesSource(
            settings.workers_kubernetes, api=settings.kubernetes_api, credentials=settings.kubernetes_credentials
        )
    return StaticSource(settings.workers)


def _tracing(settings: GatewaySettings, metrics: GatewayMetrics) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    try:
        from app.telemetry.tracing import Tracing
    except ImportError as error:
        raise StartError(
            f"otlp_endpoint is set, but {error.name} is not installed; "
            "install requirements/opentelemetry.txt (the extra hotspare[opentelemetry]), or unset it"
        ) from None
    return Tracing(str(settings.otlp_endpoint), version=metrics.version, count=metrics.spans)


def _access_log(settings: GatewaySettings, sink: LogSink | None) -> AccessLog | None:
    if sink is None or not settings.access_log or settings.log_level not in ("debug", "info"):
        return None
    return AccessLog(sink.access, settings.log_format, with_pid=settings.processes > 1)


def _discovered(lifecycle: LifecycleMachine) -> None:
    if lifecycle.state in (Lifecycle.STARTING, Lifecycle.DRAINING):
        lifecycle.fire(LifecycleEvent.DISCOVERED)


def _connections(settings: GatewaySettings, metrics: GatewayMetrics, files: int, place: Place | None) -> Connections:
    limit, surplus = room_within(files, settings.max_connections)
    if limit < settings.max_connections and (place is None or place.number == 0):  # it is the same for all of them
        chosen = "max_connections" in settings.model_fields_set
        logger.log(
            logging.WARNING if chosen else logging.INFO,
            "the limit of open files (%d) has room for %d connections of clients, not for max_connections=%d: more are "
            "answered with 503; raise it (ulimit -n), or set HOTSPARE_MAX_CONNECTIONS",
            files,
            limit,
            settings.max_connections,
        )
    return Connections(limit=limit, surplus=surplus, on_refused=metrics.connection_refused)


def _log_lifecycle(state: Lifecycle) -> None:
    logger.info("gateway is %s", state.value)


def _cors(settings: GatewaySettings) -> Cors | None:
    if not settings.cors_allow_origins:
        return None
    return Cors(
        origins=settings.cors_allow_origins,
        methods=settings.cors_allow_methods,
        headers=settings.cors_allow_headers,
        max_age_seconds=settings.cors_max_age_seconds,
    )
