"""``GET /v1/realtime``: the handshake of a realtime session, as a raw ASGI endpoint, and the way of its responses.

Before the handshake everything is an HTTP answer with the envelope, so that a client's library says what was wrong.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter

from app.clients.asgi import Receive, Scope, Send, client_of
from app.fleet.registry import WorkerRegistry
from app.http_headers import find
from app.intake.arrival import Arrival, Intake
from app.intake.request_ids import RequestIds
from app.log_fields import fields
from app.openai.errors import (
    GatewayError,
    Header,
    beta_not_supported,
    model_missing,
    model_not_found,
    not_found,
    origin_not_allowed,
    upgrade_required,
)
from app.openai.surface import RelayRoute
from app.realtime.connection import RealtimeConnection, RealtimeSessions, ResponseStream
from app.realtime.session import RealtimeLimits, RealtimeSession, StartResponse
from app.relay.headers import REQUEST_ID, client_request_id
from app.relay.relayed import Report
from app.security.credentials import ApiKeys, shown_keys, subprotocol_keys

logger = logging.getLogger(__name__)

REALTIME_PATH: Final = "/v1/realtime"
_ROUTE: Final = RelayRoute(path=REALTIME_PATH, name="realtime", streams=True, resumable=True, end_data=b"[DONE]")
_TARGET: Final = b"/v1/chat/completions"
_SUBPROTOCOL: Final = "realtime"
_BETA_SUBPROTOCOL: Final = "openai-beta.realtime-v1"
_TRACE: Final = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a client asked for."""

    model: str
    subprotocol: str | None
    """The one to choose; ``None``: it offered none that is known."""

    key: bytes
    """The API key it showed; empty if none is asked for."""


def read_handshake(scope: Scope, keys: ApiKeys | None) -> Handshake:
    """Raises:
    GatewayError: 400, 401, 403 or 404.
    """
    headers: list[Header] = scope["headers"]
    key = _check_key(scope, keys)
    path = scope["path"] if scope.get("raw_path") is None else scope["raw_path"].decode("latin-1")
    if path != REALTIME_PATH:
        raise not_found(path)
    offered: list[str] = list(scope.get("subprotocols") or ())
    beta = (find(headers, b"openai-beta") or b"").replace(b" ", b"").split(b",")
    if b"realtime=v1" in beta or _BETA_SUBPROTOCOL in offered:
        raise beta_not_supported()
    query = parse_qs(scope["query_string"].decode("latin-1"), encoding="utf-8", max_num_fields=100)
    models = query.get("model", [])
    if len(models) != 1:
        raise model_missing(REALTIME_PATH)
    return Handshake(models[0], _SUBPROTOCOL if _SUBPROTOCOL in offered else None, key)


def _check_key(scope: Scope, keys: ApiKeys | None) -> bytes:
    headers: list[Header] = scope["headers"]
    if keys is None:
        _check_origin(headers)
        return b""
    keys.check_websocket(headers, partial(client_of, scope))
    return next(key for key in (*shown_keys(headers), *subprotocol_keys(headers)) if keys.knows(key))


def _check_origin(headers: list[Header]) -> None:
    """Browsers let any page open a WebSocket anywhere, and say which page it is. Where no key is asked for, only pages
    of our own host may.
    """
    origin = find(headers, b"origin")
    if origin is None:
        return
    said = origin.decode("latin-1")
    try:
        place = urlsplit(said).netloc.lower()
    except ValueError:
        place = ""
    if not place or place != (find(headers, b"host") or b"").decode("latin-1").lower():
        raise origin_not_allowed(said)


class RealtimeEndpoint:
    """The WebSocket route as an ASGI application. ``write_timeout``: seconds."""

    def __init__(
        self,
        intake: Intake,
        sessions: RealtimeSessions,
        registry: WorkerRegistry,
        ids: RequestIds,
        keys: ApiKeys | None,
        *,
        limits: RealtimeLimits,
        write_timeout: float,
    ) -> None:
        self._intake = intake
        self._sessions = sessions
        self._registry = registry
        self._ids = ids
        self._keys = keys
        self._limits = limits
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        started = time.monotonic()
        request_id = client_request_id(scope["headers"]) or self._ids.new()
        try:
            handshake = read_handshake(scope, self._keys)
            if self._registry.is_unknown(handshake.model):
                raise model_not_found(handshake.model)
            with self._sessions.place():
                await send(
                    {
                        "type": "websocket.accept",
                        "subprotocol": handshake.subprotocol,
                        "headers": [(REQUEST_ID, request_id)],
                    }
                )
                await self._serve(handshake, scope, request_id, receive, send)
        except GatewayError as error:
            report = Report(status=error.status, error=error, bytes=len(error.body) if _answers(scope) else 0)
            if error.status == HTTPStatus.UNAUTHORIZED:
                report.client = client_of(scope)
            self._intake.accounts.close(_ROUTE, request_id, report, started)
            await _deny(scope, send, error, request_id)

    async def _serve(self, handshake: Handshake, scope: Scope, request_id: bytes, receive: Receive, send: Send) -> None:
        model = handshake.model
        session = RealtimeSession(model, secrets.token_hex(8), self._limits)
        lasting = [item for item in scope["headers"] if item[0] in _TRACE]
        if handshake.key:  # each response shows it again: a key that is withdrawn lets no further one in
            lasting.append((b"authorization", b"Bearer " + handshake.key))

        def begin(stream: ResponseStream, start: StartResponse) -> Arrival:
            """A request like any other, known by the response's id."""
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(start.body)),
                (REQUEST_ID, start.response_id.encode()),
                *lasting,
            ]
            return Arrival(self._intake, _ROUTE, stream, target=_TARGET, headers=headers)

        connection = RealtimeConnection(
            session, receive, send, begin, client=client_of(scope), write_timeout=self._write_timeout
        )
        started = time.monotonic()
        try:
            await self._sessions.run(connection)
        finally:
            logger.info(
                "a realtime session has ended",
                extra=fields(
                    model=model if self._registry.knows(model) else None,
                    ms=round((time.monotonic() - started) * 1000, 1),
                    responses=connection.responses,
                    closed=connection.close_code or None,
                    session=session.id,
                    request_id=request_id.decode(),
                ),
            )


def _answers(scope: Scope) -> bool:
    """Whether the server can answer a handshake with more than 403."""
    return "websocket.http.response" in (scope.get("extensions") or {})


async def _deny(scope: Scope, send: Send, error: GatewayError, request_id: bytes) -> None:
    """An HTTP answer to the handshake; a server that cannot give one says 403."""
    if not _answers(scope):
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})
        return
    body = error.body
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID, request_id),
        *error.headers,
    ]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def realtime_router() -> APIRouter:
    """What a client without a WebSocket is told."""
    router = APIRouter()

    @router.get(REALTIME_PATH)
    async def not_a_websocket() -> None:
        raise upgrade_required(REALTIME_PATH)

    return router
