"""What one client has been sent so far, and how its answer goes on from there.

Between worker and client: events and whole answers come in from an attempt, errors and keep-alives from the relay, and
each leaves in the form that is still possible: a status before the head is out, an event after it, a broken connection
where neither can be said any more.
"""

from __future__ import annotations

import time

from app.openai.errors import GatewayError, Header, bad_answer
from app.openai.sse import KEEPALIVE, error_event
from app.openai.worker_answers import from_worker, has_envelope
from app.relay.downstream import Downstream, send_error
from app.relay.headers import PROCESSING_MS, downstream_headers, stream_headers
from app.relay.kept import Kept
from app.relay.relayed import RelayRequest, Report


class Delivery:
    """An attempt's ``Answer``."""

    __slots__ = (
        "_began",
        "_delivered",
        "_downstream",
        "_event_stream",
        "_head_sent",
        "_kept",
        "_report",
        "_request",
        "sent_at",
    )

    def __init__(self, request: RelayRequest, kept: Kept, downstream: Downstream, report: Report) -> None:
        self._request = request
        self._kept = kept
        self._downstream = downstream
        self._report = report
        self._head_sent = False
        self._event_stream = False
        self._delivered = False
        self.sent_at = time.monotonic()
        """When the client last got something; before that, when the request came."""
        self._began = self.sent_at

    @property
    def delivered(self) -> bool:
        return self._delivered

    @property
    def head_sent(self) -> bool:
        """From here on nothing can be a status any more."""
        return self._head_sent

    def events(self, status: int, headers: list[Header], events: bytes) -> None:
        if not self._delivered:
            self._begin_delivery()
            self._kept.begun()
            self._report.streamed = True
            if not self._head_sent:
                self._send_stream_head(headers)
        self.sent_at = time.monotonic()
        report = self._report
        report.events += events.count(b"\n\n")
        report.bytes += len(events)
        report.last_event_at = self.sent_at
        self._downstream.send_bytes(events)

    def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        request_id = self._request.request_id
        self._begin_delivery()
        if status >= 400 and not has_envelope(body):
            request = self._request
            body = from_worker(status, body, model=request.model, path=request.route.path).body
            headers = [item for item in headers if item[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
        if self._head_sent:
            # Keep-alives have gone out: what should have been a status can only be an event now.
            error = bad_answer(f"The worker answered {status}: {body[:1000].decode('utf-8', 'replace')}")
            self._report.error = error
            self._downstream.send_bytes(error_event(error, named=self._request.route.named_errors))
            return
        kept = downstream_headers(headers, request_id=request_id)
        kept.append((b"content-length", b"%d" % len(body)))
        self._report.bytes = len(body)
        self._send_head(400 if status == 422 else status, kept)
        self._downstream.send_bytes(body)

    def part(self, status: int, headers: list[Header], data: bytes, done: bool) -> None:
        if not self._delivered:
            self._begin_delivery()
            self._kept.done()
            if not self._head_sent:
                self._send_head(status, downstream_headers(headers, request_id=self._request.request_id))
        self.sent_at = time.monotonic()
        if data:
            self._report.bytes += len(data)
            self._downstream.send_bytes(data)

    def noted(self) -> None:
        """Nobody is told of it."""

    def _begin_delivery(self) -> None:
        self._delivered = True
        self._report.first_byte_at = time.monotonic()

    def _send_head(self, status: int, headers: list[Header]) -> None:
        self._head_sent = True
        self._report.status = status
        headers.append((PROCESSING_MS, b"%d" % ((time.monotonic() - self._began) * 1000)))
        self._downstream.send_head(status, headers)

    def _send_stream_head(self, headers: list[Header]) -> None:
        self._event_stream = True
        self._send_head(200, stream_headers(headers, request_id=self._request.request_id))

    def fail(self, error: GatewayError) -> None:
        """Tell the client, in the form that is still possible."""
        self._report.error = error
        if not self._head_sent:
            self._report.status = error.status
            self._report.bytes = send_error(self._downstream, error, self._request.request_id)
        elif self._event_stream:
            self._downstream.send_bytes(error_event(error, named=self._request.route.named_errors))
            self._downstream.end()
        else:
            self._downstream.abort()

    def keep_alive(self) -> None:
        """Say that we are still there, if the answer is, or may become, an event stream."""
        self.sent_at = time.monotonic()
        if not self._head_sent:
            self._send_stream_head([])
        if self._event_stream:
            self._downstream.send_bytes(KEEPALIVE)
