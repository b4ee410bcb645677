"""Builds the gateway: the only place where its parts are put together."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from app.admission import AdmissionController
from app.clients.asgi import Message, Receive, Scope, Send
from app.clients.connections import Connections, room_within
from app.clients.cors import Cors
from app.clients.decoders import Decoders
from app.clients.direct import DirectEndpoint
from app.clients.methods import methods_of, with_general, without_body
from app.clients.uploads import Uploads
from app.discovery.follower import Discovery
from app.discovery.kubernetes import KubernetesSource
from app.discovery.sources import DnsSource, FileSource, Source, StaticSource
from app.drain import DrainProgress
from app.each import each
from app.fleet.registry import WorkerRegistry
from app.fleet.routing import RoundRobinRouter
from app.intake import Intake, RequestIds
from app.lifecycle import Lifecycle, LifecycleEvent, LifecycleMachine
from app.openai.errors import GatewayError, Header, from_status, internal, method_not_allowed, not_found
from app.openai.refused import refusal
from app.openai.surface import RELAY_ROUTES
from app.processes.siblings import Place, Siblings
from app.realtime.connection import RealtimeSessions
from app.realtime.session import RealtimeLimits
from app.relay.exchange import Relay, RelayLimits
from app.relay.headers import REQUEST_ID, client_request_id
from app.relay.waiting import WaitQueue
from app.routes.docs import DOCS_PATHS, docs_router
from app.routes.health import health_router
from app.routes.metrics import look_at, metrics_router
from app.routes.openai import RelayEndpoint, models_router
from app.routes.realtime import RealtimeEndpoint, realtime_router
from app.routes.status import describe_gateway, status_router
from app.security.access import Access
from app.security.credentials import OPEN_PATHS, ApiKeys
from app.settings import GatewaySettings
from app.start_error import StartError
from app.telemetry.access_log import AccessLog
from app.telemetry.log_sink import LogSink
from app.telemetry.loop_lag import LoopLag
from app.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:
    from app.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_MODEL_PATHS = b"/v1/models/"
"""The only paths with something in them to be percent-encoded: a model's name."""

_OPEN = OPEN_PATHS | DOCS_PATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts that outlive a request; the server drains through them."""

    settings: GatewaySettings
    access: Access
    lifecycle: LifecycleMachine
    admission: AdmissionController
    registry: WorkerRegistry
    discovery: Discovery
    relay: Relay
    queue: WaitQueue
    intake: Intake
    metrics: GatewayMetrics
    drain: DrainProgress
    sessions: RealtimeSessions

    def interrupt_all(self, error: GatewayError) -> int:
        """End every admitted request with this error; returns how many there were. Sessions close once theirs have."""
        parts = (self.intake.uploads, self.intake.decoders, self.relay)
        cut = sum(each([partial(part.interrupt_all, error) for part in parts]))
        each([self.sessions.hasten, lambda: self.metrics.drain_cut(cut)])
        return cut


class GatewayApp(FastAPI):
    """FastAPI for everything but the relayed routes, which are reached by one look into a dictionary."""

    gateway: Gateway
    endpoints: Mapping[str, RelayEndpoint]
    """The relayed routes for any ASGI server; ours has them as ``direct``."""
    direct: Mapping[bytes, DirectEndpoint]
    realtime: RealtimeEndpoint
    """All WebSockets. It looks at keys itself."""
    ids: RequestIds
    keys: ApiKeys | None
    """Relayed routes look themselves."""
    cors: Cors | None
    connections: Connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.realtime(scope, receive, send)
            return
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.cors is not None:
            send = _with_headers(self.cors.answer(scope["headers"]), send)
        endpoint = self.endpoints.get(scope["raw_path"].decode("latin-1"))
        if endpoint is not None and scope["method"] == "POST":
            await endpoint(scope, receive, send)
            return
        request_id = client_request_id(scope["headers"]) or self.ids.new()
        send_with_id = _with_headers([(REQUEST_ID, request_id)], send)
        raw_path: bytes = scope["raw_path"]
        # A preflight comes without credentials (Fetch standard), and its answer holds nothing.
        if self.keys is not None and raw_path not in _OPEN and scope["method"] != "OPTIONS":
            try:
                self.keys.check(scope["headers"])
            except GatewayError as error:
                await self.refusal(error)(scope, receive, send_with_id)
                return
        if b"%" in raw_path and not raw_path.startswith(_MODEL_PATHS):
            # Routes are matched as they are written: a proxy's rules about paths must mean the same as ours.
            await self.refusal(not_found(raw_path.decode("latin-1")))(scope, receive, send_with_id)
            return
        if scope["method"] == "OPTIONS" and (allowed := self.allowed(scope)):
            preflight = [] if self.cors is None else self.cors.preflight(scope["headers"])
            headers = [(b"allow", ", ".join(allowed).encode("ascii")), *preflight]
            await send_with_id({"type": "http.response.start", "status": 204, "headers": headers})
            await send_with_id({"type": "http.response.body", "body": b""})
            return
        if scope["method"] == "HEAD":
            scope, send_with_id = {**scope, "method": "GET"}, without_body(send_with_id)
        await super().__call__(scope, receive, send_with_id)

    def refusal(self, error: GatewayError) -> Response:
        """An error of the gateway's own, as an answer; it is counted."""
        self.gateway.metrics.unrouted_error(error.code)
        response = Response(error.body, status_code=error.status, media_type="application/json")
        for name, value in error.headers:
            response.headers[name.decode()] = value.decode()
        return response

    def allowed(self, scope: Scope) -> list[str]:
        """The methods that the path of ``scope`` answers; none if there is no such path."""
        if scope["raw_path"] == b"*":  # the server as a whole
            return with_general(("GET", "POST"))
        found = {"POST"} if scope["path"] in self.endpoints else set()
        return with_general(found | set(methods_of(self.routes, scope)))


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
    )
    discovery = Discovery(_source(settings), registry, on_discovered=lambda: _discovered(lifecycle))
    queue = WaitQueue(registry, limit=settings.max_queued)
    admission = AdmissionController(lifecycle, limit=settings.max_inflight, per_second=queue.per_second)
    relay = Relay(
        registry=registry,
        router=RoundRobinRouter(),
        token=access.worker_token,
        queue=queue,
        limits=RelayLimits(
            wait_for_worker=settings.wait_for_worker_seconds,
            first_byte=settings.first_byte_timeout_seconds or math.inf,
            stall=settings.stall_timeout_seconds or math.inf,
            keepalive=settings.sse_keepalive_seconds,
            attempts=settings.attempt_limit,
            max_held_bytes=settings.max_held_bytes,
        ),
    )
    tracing = _tracing(settings, metrics)
    decoders = Decoders()
    intake = Intake(
        admission=admission,
        relay=relay,
        metrics=metrics,
        ids=ids,
        uploads=Uploads(stall_seconds=settings.body_stall_timeout_seconds),
        decoders=decoders,
        max_body_bytes=settings.max_body_bytes,
        keys=access.keys,
        access_log=_access_log(settings, sink),
        tracing=tracing,
    )

    drain = DrainProgress()
    sessions = RealtimeSessions(lifecycle, limit=settings.max_realtime_sessions)
    look = look_at(metrics, lifecycle, admission, registry, discovery, drain, sink, sessions, access.tls, queue)

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
    app.connections = _connections(settings, metrics, files)
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
    _install_errors(app)
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


def _connections(settings: GatewaySettings, metrics: GatewayMetrics, files: int) -> Connections:
    limit, surplus = room_within(files, settings.max_connections)
    if limit < settings.max_connections:
        logger.warning(
            "the limit of open files (%d) has room for %d connections of clients, not for max_connections=%d: more are "
            "answered with 503; raise it (ulimit -n), or set HOTSPARE_MAX_CONNECTIONS",
            files,
            limit,
            settings.max_connections,
        )
    return Connections(limit=limit, surplus=surplus, on_refused=metrics.connection_refused)


def _log_lifecycle(state: Lifecycle) -> None:
    logger.info("gateway is %s", state.value)


def _with_headers(headers: list[Header], send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers


def _cors(settings: GatewaySettings) -> Cors | None:
    if not settings.cors_allow_origins:
        return None
    return Cors(
        origins=settings.cors_allow_origins,
        methods=settings.cors_allow_methods,
        headers=settings.cors_allow_headers,
        max_age_seconds=settings.cors_max_age_seconds,
    )


def _install_errors(app: GatewayApp) -> None:
    """Every error has the OpenAI envelope, those of the web framework too."""

    async def gateway_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, GatewayError):
            raise error
        return app.refusal(error)

    async def http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        path = request.url.path
        if error.status_code in (404, 405) and path in app.endpoints:
            return app.refusal(method_not_allowed(request.method, path, app.allowed(request.scope)))
        if error.status_code == 404:
            return app.refusal(refusal(path) or not_found(path))
        if error.status_code == 405:
            return app.refusal(method_not_allowed(request.method, path, app.allowed(request.scope)))
        return app.refusal(from_status(error.status_code, str(error.detail)))

    async def invalid(request: Request, error: Exception) -> Response:
        return app.refusal(from_status(422, str(error)))

    async def crashed(request: Request, error: Exception) -> Response:
        return app.refusal(internal())

    app.add_exception_handler(GatewayError, gateway_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, crashed)
