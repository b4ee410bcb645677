"""The protocol shell over the relay: an answer goes from the worker's socket to the client's without ASGI in between.

uvicorn keeps one *cycle* for each request on a connection: it feeds it the body, tells it of the client's end, and
starts the next one when it is complete. ``DirectCycle`` stands in the place of uvicorn's own for relayed requests, so
that keep-alive, pipelining and shutdown stay uvicorn's, and the bytes are ours.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

from app.downstream import ClientGone, DownstreamObserver
from app.intake import Intake
from app.openai.errors import GatewayError, Header, body_too_large
from app.openai.surface import RelayRoute

if TYPE_CHECKING:
    from app.client_protocol import ClientProtocol

T = TypeVar("T")

logger = logging.getLogger(__name__)

LINGER_SECONDS: Final = 2.0
"""How long a client that was answered before its body ended is read on: closing at once could take the answer away from
it (RFC 9112, section 9.6)."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_STATUS_LINES: Final = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class DirectEndpoint:
    """One relayed route, for connections that serve it directly. Durations in seconds."""

    def __init__(self, route: RelayRoute, intake: Intake, *, body_timeout: float, write_timeout: float) -> None:
        self.route = route
        self.intake = intake
        self.body_timeout = body_timeout
        self.write_timeout = write_timeout


class DirectCycle:
    """One request and its answer: a ``Downstream`` to the relay, a cycle to uvicorn's protocol."""

    def __init__(
        self,
        protocol: ClientProtocol,
        endpoint: DirectEndpoint,
        *,
        target: bytes,
        headers: list[Header],
        keep_alive: bool,
        chunks: bool,
        expects_continue: bool,
    ) -> None:
        """``chunks``: the client knows chunked bodies; without, the connection's end is the answer's."""
        self._protocol = protocol
        self._transport = protocol.transport
        self._endpoint = endpoint
        self._target = target
        self._headers = headers
        self._chunks = chunks
        self._expects_continue = expects_continue
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_error: GatewayError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._observer: DownstreamObserver | None = None
        self._head = b""
        self._chunked = False
        self._stall: asyncio.TimerHandle | None = None
        self._stalled_at = 0
        # What uvicorn's protocol reads and writes
        self.keep_alive = keep_alive
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.message_event = self

    # A cycle of uvicorn's

    async def run_asgi(self, app: object) -> None:
        """Answers. uvicorn calls it so."""
        endpoint = self._endpoint
        try:
            await endpoint.intake.serve(
                endpoint.route,
                target=self._target,
                headers=self._headers,
                read_body=self._read_body,
                downstream=self,
            )
        finally:
            self._end_stall()
            if not (self.response_complete or self.disconnected):
                self._transport.close()

    def feed(self, data: bytes) -> None:
        """A part of the body. What is over the limit is not kept."""
        self._body_bytes += len(data)
        if self._body_bytes <= self._endpoint.intake.max_body_bytes:
            self._body.append(data)
        else:
            self._body.clear()
            self._wake()

    def refuse_body(self, error: GatewayError) -> None:
        """What follows is not the rest of the body."""
        self._body_error = error
        self._wake()

    def set(self) -> None:
        """As an event: the body is complete, or the client is gone."""
        self._wake()
        if self.disconnected and self._observer is not None:
            self._observer.client_gone()

    def body_ended(self) -> None:
        """After the answer was complete."""
        self._transport.close()

    def pause_writing(self) -> None:
        if self._observer is not None:
            self._observer.pause()
        self._stalled_at = self._transport.get_write_buffer_size()
        self._stall = self._protocol.loop.call_later(self._endpoint.write_timeout, self._look_at_progress)

    def resume_writing(self) -> None:
        self._end_stall()
        if self._observer is not None:
            self._observer.resume()

    # A Downstream

    def observe(self, observer: DownstreamObserver | None) -> None:
        self._observer = observer
        if self.disconnected and observer is not None:
            observer.client_gone()

    def send_head(self, status: int, headers: list[Header]) -> None:
        """Held until the first bytes, so that both go out in one write."""
        self.response_started = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._protocol.default_head()]
        framed = False
        for name, value in headers:
            framed = framed or name == b"content-length"
            if name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
            else:
                lines += (name, b": ", value, b"\r\n")
        if self.more_body:
            self.keep_alive = False  # nobody knows where this body would end
        if not framed:
            self._chunked = self._chunks
            if self._chunks:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def send_bytes(self, data: bytes) -> None:
        if self.disconnected or not data:
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._transport.write(data)

    def end(self) -> None:
        if self.disconnected or self.response_complete:
            return
        rest = self._head + _LAST_CHUNK if self._chunked else self._head
        self._head = b""
        if rest:
            self._transport.write(rest)
        self.response_complete = True
        if not self.keep_alive:
            self._close()
        self._protocol.on_response_complete()

    def abort(self) -> None:
        """What was sent goes out, and then the connection ends where an answer would go on."""
        self._transport.close()

    async def pump(self, until: asyncio.Future[T]) -> T:
        """Nothing to do: what is sent is on its way."""
        return await until

    async def close(self) -> None:
        """Small rests are left to the transport, which a drain waits for (``server``)."""
        if self._stall is not None and not self.disconnected:
            await self._protocol.written(self._endpoint.write_timeout)

    # The body

    async def _read_body(self) -> bytes:
        limit = self._endpoint.intake.max_body_bytes
        if self.more_body and self._body_bytes <= limit and self._body_error is None:
            if self._expects_continue:
                self._transport.write(_CONTINUE)
            async with self._endpoint.intake.uploads.within(self._endpoint.body_timeout):
                await self._until_body(limit)
        if self._body_bytes > limit:
            raise body_too_large(limit)
        if self._body_error is not None:
            raise self._body_error
        if self.more_body:
            raise ClientGone
        body, self._body = self._body, []
        return body[0] if len(body) == 1 else b"".join(body)

    async def _until_body(self, limit: int) -> None:
        """Until it is complete, too large, or its client gone."""
        try:
            while self.more_body and self._body_bytes <= limit and not (self.disconnected or self._body_error):
                self._waiting = self._protocol.loop.create_future()
                await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _close(self) -> None:
        if not self.more_body:
            self._transport.close()
        else:
            self._protocol.close_slowly()

    # A slow client

    def _look_at_progress(self) -> None:
        self._stall = None
        left = self._transport.get_write_buffer_size()
        if left >= self._stalled_at:
            self._transport.abort()
        else:
            self._stalled_at = left
            self._stall = self._protocol.loop.call_later(self._endpoint.write_timeout, self._look_at_progress)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
