"""From a request as it arrived to the relay, and its accounts afterwards. Independent of the transport.

A shell begins an :class:`Arrival` with a request's head, and hands it the body when that is complete. Order: may this
client, is the gateway taking requests, is there room, the body, as much of it understood as routing needs, the relay;
and when the answer is out, the accounts. Only then is the token of admission released, whatever happened: a drain waits
for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from app.admission import AdmissionController, InflightToken
from app.intake.accounts import Accounts
from app.intake.content_coding import CODINGS, Decoding, coding_of, without_coding
from app.intake.decoders import Decoder, Decoders
from app.intake.request_ids import RequestIds
from app.intake.uploads import Uploads
from app.log_fields import fields
from app.openai.errors import (
    GatewayError,
    Header,
    body_too_large,
    internal,
    unsupported_encoding,
    unsupported_media_type,
)
from app.openai.surface import RelayRoute
from app.relay.downstream import Downstream, send_error
from app.relay.exchange import Exchange
from app.relay.headers import client_request_id
from app.relay.relay import Relay
from app.relay.relayed import RelayRequest, Report
from app.security.credentials import ApiKeys
from workers.resume import RESUME_CONTENT_TYPE

if TYPE_CHECKING:
    from app.telemetry.tracing import RequestSpan, Tracing

logger = logging.getLogger(__name__)

_RESUME = RESUME_CONTENT_TYPE.encode()

INLINE_BYTES = 256 * 1024
"""So much of a compressed body is decoded on the event loop: about a millisecond's work."""
_JUDGED = frozenset((b"content-type", b"content-encoding", b"content-length"))


def check_headers(headers: list[Header], max_body_bytes: int) -> str:
    """Refuse what no body could make right; returns how the body is compressed, if it is.

    Raises:
        GatewayError: 413 or 415.
    """
    codings: list[str] = []
    length = b""
    for name, value in headers:
        if name not in _JUDGED:
            continue
        if name == b"content-length":
            length = length or value
        elif name == b"content-type":
            if _RESUME in value.lower():  # wherever: readers differ about doublets
                raise unsupported_media_type(RESUME_CONTENT_TYPE)
        elif coding := coding_of(value):
            codings.append(coding)
    if len(codings) > 1:
        raise unsupported_encoding(", ".join(codings), CODINGS)
    length = length.strip().lstrip(b"0")
    if length.isdigit() and (len(length) > 18 or int(length) > max_body_bytes):
        raise body_too_large(max_body_bytes)
    return codings[0] if codings else ""


class Intake:
    """The way in, shared by all shells."""

    def __init__(
        self,
        *,
        admission: AdmissionController,
        relay: Relay,
        accounts: Accounts,
        ids: RequestIds,
        uploads: Uploads,
        decoders: Decoders,
        max_body_bytes: int,
        keys: ApiKeys | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Without ``keys`` every client may."""
        self.keys = keys
        self.admission = admission
        self.relay = relay
        self.accounts = accounts
        self.ids = ids
        self.tracing = tracing
        self.max_body_bytes = max_body_bytes
        self.uploads = uploads
        self.decoders = decoders


class Arrival:
    """One request of a relayed route, from its head to its accounts.

    :meth:`begin` with the head; then exactly one of :meth:`body`, :meth:`refuse` and :meth:`leave`, unless it is
    ``over`` already. What goes wrong becomes an answer.
    """

    __slots__ = (
        "_coding",
        "_decoding",
        "_downstream",
        "_exchange",
        "_gateway_id",
        "_headers",
        "_intake",
        "_report",
        "_request_id",
        "_route",
        "_span",
        "_started",
        "_target",
        "_token",
        "over",
    )

    def __init__(
        self, intake: Intake, route: RelayRoute, downstream: Downstream, *, target: bytes, headers: list[Header]
    ) -> None:
        self._intake = intake
        self._route = route
        self._downstream = downstream
        self._target = target
        self._headers = headers
        self._started = time.monotonic()
        self._span: RequestSpan | None = None
        if intake.tracing is not None:
            self._span = intake.tracing.begin(route, headers)
            self._headers = self._span.headers(headers)
        self._gateway_id = intake.ids.new()
        self._request_id = client_request_id(headers) or self._gateway_id
        self._report = Report()
        self._token: InflightToken | None = None
        self._exchange: Exchange | None = None
        self._coding = ""
        self._decoding: Decoder | None = None
        self.over = False
        """Nothing more is wanted of the request."""

    def begin(self) -> None:
        """Take the request, or answer why not."""
        try:
            if self._intake.keys is not None:
                self._intake.keys.check(self._headers, self._downstream.client)
            self._token = self._intake.admission.admit()
            self._coding = check_headers(self._headers, self._intake.max_body_bytes)
        except GatewayError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                self._report.client = self._downstream.client()
            self.refuse(error)
        except Exception:
            self._failed()

    def body(self, body: bytes) -> None:
        """The whole body: relay the request."""
        if self.over:
            return
        self.over = True
        if self._coding:
            self._decode(body)
        else:
            self._relay(body)

    def _decode(self, coded: bytes) -> None:
        """A large body is decoded in a thread, which costs less than it would hold up here."""
        decoding = Decoding(self._coding, coded, self._intake.max_body_bytes)
        self._headers = without_coding(self._headers)
        try:
            whole = decoding.run(INLINE_BYTES)
        except GatewayError as error:
            self._answer(error)
            return
        if whole:
            self._relay(decoding.body)
        else:
            self._decoding = self._intake.decoders.start(decoding, lambda error: self._decoded(decoding, error))

    def _decoded(self, decoding: Decoding, error: BaseException | None) -> None:
        self._decoding = None
        if self._report.disconnected or isinstance(error, asyncio.CancelledError):
            self._report.disconnected = True
            self._settle()
        elif error is None:
            self._relay(decoding.body)
        elif isinstance(error, GatewayError):
            self._answer(error)
        else:
            self._failed(error)

    def _relay(self, body: bytes) -> None:
        report, route = self._report, self._route
        try:
            report.model, stream = route.read(body, self._headers)
            request = RelayRequest(
                route,
                self._target,
                self._headers,
                report.model,
                stream and route.streams,
                self._request_id,
                self._gateway_id,
            )
            exchange = self._intake.relay.start(request, body, self._downstream, report, self._settle)
            self._exchange = None if exchange.ended else exchange
        except GatewayError as error:
            self._answer(error)
        except Exception:
            self._failed()

    def refuse(self, error: GatewayError) -> None:
        """The body is not to be had, or not wanted, for this reason."""
        if not self.over:
            self.over = True
            self._answer(error)

    def leave(self) -> None:
        """The client is gone, or the shell gives up."""
        if self._exchange is not None:
            self._exchange.client_gone()
        elif self._decoding is not None:
            self._report.disconnected = True
            self._decoding.stop()
        elif not self.over:
            self.over = True
            self._report.disconnected = True
            self._settle()

    def _answer(self, error: GatewayError) -> None:
        self._report.status, self._report.error = error.status, error
        self._report.bytes = send_error(self._downstream, error, self._request_id)
        self._settle()

    def _failed(self, error: BaseException | None = None) -> None:
        """A bug of ours, in the middle of anything; without ``error`` the one being handled."""
        self.over = True
        report = self._report
        logger.error(
            "request failed",
            exc_info=error or True,
            extra=fields(route=self._route.name, request_id=self._request_id.decode()),
        )
        if report.status:
            report.error = internal()
            self._downstream.abort()
            self._settle()
        else:
            self._answer(internal())

    def _settle(self) -> None:
        self._downstream.settle(self._account)

    def _account(self) -> None:
        self._exchange = None  # no circle is left for the collector
        token, self._token = self._token, None
        if token is not None:
            token.release()
        self._intake.accounts.close(self._route, self._request_id, self._report, self._started, self._span)
