"""The gateway as an ASGI application: who answers which request, and in what form it is refused.

Relayed routes are reached by one look into a dictionary; everything else is FastAPI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from app.access import Access
from app.admission import AdmissionController
from app.clients.asgi import Message, Receive, Scope, Send, client_of
from app.clients.connections import Connections
from app.clients.cors import Cors
from app.clients.direct import DirectEndpoint
from app.clients.methods import methods_of, with_general, without_body
from app.discovery.follower import Discovery
from app.drain import DrainProgress
from app.each import each
from app.fleet.registry import WorkerRegistry
from app.intake.arrival import Intake
from app.intake.request_ids import RequestIds
from app.lifecycle import LifecycleMachine
from app.openai.errors import GatewayError, Header, from_status, internal, method_not_allowed, not_found
from app.openai.refused import refusal
from app.realtime.connection import RealtimeSessions
from app.relay.headers import REQUEST_ID, client_request_id
from app.relay.relay import Relay
from app.relay.waiting import WaitQueue
from app.routes.docs import DOCS_PATHS
from app.routes.openai import RelayEndpoint
from app.routes.realtime import RealtimeEndpoint
from app.security.credentials import OPEN_PATHS, ApiKeys
from app.settings import GatewaySettings
from app.telemetry.metrics import GatewayMetrics

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
                self.keys.check(scope["headers"], partial(client_of, scope))
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


def install_errors(app: GatewayApp) -> None:
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


def _with_headers(headers: list[Header], send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers
