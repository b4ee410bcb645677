"""From a request as it arrived to the relay, and its accounts afterwards. Independent of the transport.

Order: may this client, is the gateway taking requests, is there room, read the body, understand as much of it as
routing needs, relay, and wait until the answer is out. Only then is the token of admission released, whatever happened:
a drain waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from app.admission import AdmissionController
from app.credentials import ApiKeys
from app.downstream import ClientGone, Downstream, send_error
from app.headers import client_request_id, find
from app.logs import fields
from app.metrics import GatewayMetrics
from app.openai.errors import GatewayError, Header, body_too_large, internal, invalid_json, unsupported_media_type
from app.openai.surface import RESUME_CONTENT_TYPE, RelayRoute
from app.relay import Relay
from app.relayed import RelayRequest, Report
from app.uploads import Uploads

logger = logging.getLogger("app.access")

CLIENT_CLOSED_REQUEST = 499
"""The status under which a request counts whose client left before its head was sent (nginx's convention)."""


def check_headers(headers: list[Header], max_body_bytes: int) -> None:
    """Refuse what no body could make right.

    Raises:
        GatewayError: 400, 413 or 415.
    """
    for name, value in headers:
        if name == b"content-type" and RESUME_CONTENT_TYPE in value.lower():  # wherever: readers differ about doublets
            raise unsupported_media_type(RESUME_CONTENT_TYPE.decode())
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            said = value[:100].decode("latin-1")
            raise invalid_json(f"content-encoding {said!r} is not supported; send it uncompressed")
    length = (find(headers, b"content-length") or b"").strip().lstrip(b"0")
    if length.isdigit() and (len(length) > 18 or int(length) > max_body_bytes):
        raise body_too_large(max_body_bytes)


class RequestIds:
    """Ids that the gateway makes: unique across restarts and gateways."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).encode()
        self._numbers = itertools.count(1)

    def new(self) -> bytes:
        return b"%b-%x" % (self._prefix, next(self._numbers))


class Intake:
    """The way in, shared by all shells."""

    def __init__(
        self,
        *,
        admission: AdmissionController,
        relay: Relay,
        metrics: GatewayMetrics,
        ids: RequestIds,
        max_body_bytes: int,
        keys: ApiKeys | None = None,
    ) -> None:
        """Without ``keys`` every client may."""
        self._keys = keys
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._ids = ids
        self.max_body_bytes = max_body_bytes
        self.uploads = Uploads()

    async def serve(
        self,
        route: RelayRoute,
        *,
        target: bytes,
        headers: list[Header],
        read_body: Callable[[], Awaitable[bytes]],
        downstream: Downstream,
    ) -> None:
        """Answer one request of a relayed route, and close ``downstream``.

        ``read_body`` returns the whole body, or raises :class:`GatewayError` (too large, too slow) or
        :class:`ClientGone`.
        """
        started = time.monotonic()
        gateway_id = self._ids.new()
        request_id = client_request_id(headers) or gateway_id
        report = Report()
        with contextlib.ExitStack() as held:
            try:
                if self._keys is not None:
                    self._keys.check(headers)
                held.enter_context(self._admission.admit())
                check_headers(headers, self.max_body_bytes)
                body = await read_body()
                report.model, stream = route.read(body, headers)
                request = RelayRequest(
                    route=route,
                    target=target,
                    headers=headers,
                    body=body,
                    model=report.model,
                    streaming=stream and route.streams,
                    request_id=request_id,
                    gateway_id=gateway_id,
                )
                await self._relay.run(request, downstream, report)
            except ClientGone:
                report.disconnected = True
            except GatewayError as error:
                report.status, report.error = error.status, error
                send_error(downstream, error, request_id)
            except Exception:
                logger.exception("request failed", extra=fields(route=route.name, request_id=request_id.decode()))
                report.error = internal()
                if report.status:
                    downstream.abort()
                else:
                    report.status = report.error.status
                    send_error(downstream, report.error, request_id)
            finally:
                try:
                    await downstream.close()
                finally:
                    self._account(route, request_id, report, started)

    def _account(self, route: RelayRoute, request_id: bytes, report: Report, started: float) -> None:
        seconds = time.monotonic() - started
        first = report.first_byte_at - started if report.first_byte_at else None
        status = report.status or CLIENT_CLOSED_REQUEST
        known = report.model if self._relay.registry.knows(report.model) else ""
        self._metrics.request(
            route=route.name,
            model=known,
            status=status,
            seconds=seconds,
            first_token_seconds=first if report.streamed else None,
            inter_token_seconds=report.event_seconds,
        )
        error = report.error
        if report.retries or report.disconnected or error is not None:
            self._metrics.trouble(
                route=route.name,
                retries=report.retries,
                disconnected=report.disconnected,
                error_code="" if error is None else error.code,
            )
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "%s %d",
                route.path,
                status,
                extra=fields(
                    model=known or None,
                    ms=round(seconds * 1000, 1),
                    first_ms=None if first is None else round(first * 1000, 1),
                    worker=report.worker or None,
                    retries=report.retries or None,
                    error=error and error.code,
                    fault=error and error.fault,
                    retryable=error and error.retryable,
                    disconnected=report.disconnected or None,
                    request_id=request_id.decode(),
                ),
            )
