"""The protocol shell over the relay: an answer goes from the worker's socket to the client's without ASGI in between.

uvicorn keeps one *cycle* for each request on a connection: it feeds it the body, tells it of the client's end, and
starts the next one when it is complete. ``DirectCycle`` stands in the place of uvicorn's own for relayed requests, so
that keep-alive, pipelining and shutdown stay uvicorn's, and the bytes are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from app.clients.cors import Cors
from app.intake.arrival import Arrival, Intake
from app.intake.uploads import Upload
from app.openai.errors import GatewayError, Header, body_too_large
from app.openai.surface import RelayRoute
from app.relay.downstream import DownstreamObserver

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_STATUS_LINES: Final = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class Connection(Protocol):
    """What a cycle needs of its client's connection: ``protocol`` has it, most of it from uvicorn."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    cors: Cors | None
    client: tuple[str, int] | None
    """The client's address and port."""

    def default_head(self) -> bytes:
        """The lines that every answer has."""
        ...

    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        ...

    def close_slowly(self) -> None:
        """End what is sent, and read on for a moment."""
        ...

    def on_response_complete(self) -> None: ...

    def tell_when_written(self, cycle: DirectCycle) -> None:
        """Call ``cycle.settled`` when nothing is left to write, or the connection is lost."""
        ...


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
        protocol: Connection,
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
        self._arrival: Arrival | None = None
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._body_error: GatewayError | None = None
        self._upload: Upload | None = None
        self._observer: DownstreamObserver | None = None
        self._head = b""
        self._chunked = False
        self._stall: asyncio.TimerHandle | None = None
        self._stalled_at = 0
        self._then: Callable[[], None] | None = None
        # What uvicorn's protocol reads and writes
        self.keep_alive = keep_alive
        self.more_body = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.message_event = self

    # What the protocol says

    def start(self) -> None:
        """It is this request's turn. Its body may have come with its head, or be still to come."""
        if self.disconnected:
            return
        endpoint = self._endpoint
        self._arrival = arrival = Arrival(
            endpoint.intake, endpoint.route, self, target=self._target, headers=self._headers
        )
        if self._protocol.flow.write_paused:  # an earlier answer still waits for this client
            self.pause_writing()
        arrival.begin()
        if self._body_error is not None:
            arrival.refuse(self._body_error)
        elif not self.more_body:
            self._hand_over()
        elif not arrival.over:
            if self._expects_continue:
                self._transport.write(_CONTINUE)
            self._upload = endpoint.intake.uploads.expect(
                endpoint.body_timeout, lambda: self._body_bytes, self.refuse_body
            )

    def feed(self, data: bytes) -> None:
        """A part of the body. What is over the limit is not kept."""
        self._body_bytes += len(data)
        if self._body_bytes <= self._endpoint.intake.max_body_bytes:
            if not self._body:
                self._body = data
            else:  # not a list: a body may come in very small parts
                self._body = body = self._body if isinstance(self._body, bytearray) else bytearray(self._body)
                body += data
        else:
            self._body = b""
            self.refuse_body(body_too_large(self._endpoint.intake.max_body_bytes))

    def refuse_body(self, error: GatewayError) -> None:
        """What follows is not the rest of the body, or nobody waits for it any longer."""
        self._body_error = error
        self._body = b""
        self._end_body()
        if self._arrival is not None:
            self._arrival.refuse(error)

    def body_ended(self) -> None:
        self.more_body = False
        if self.response_complete:
            self._transport.close()  # it was answered before
        elif self._arrival is not None:
            self._hand_over()

    def gone(self) -> None:
        """The connection is lost."""
        self.disconnected = True
        self._body = b""
        self._end_body()
        self._end_stall()
        if self._arrival is not None:
            self._arrival.leave()
        self.settled()

    def set(self) -> None:
        """uvicorn's event, which nobody waits for here."""

    def _hand_over(self) -> None:
        self._end_body()
        arrival = self._arrival
        if arrival is None or arrival.over:
            return
        if self._body_bytes > self._endpoint.intake.max_body_bytes:
            self.refuse_body(body_too_large(self._endpoint.intake.max_body_bytes))
            return
        body, self._body = self._body, b""
        arrival.body(bytes(body))

    def _end_body(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.end()

    def pause_writing(self) -> None:
        if self._observer is not None:
            self._observer.pause()
        self._stalled_at = self._protocol.unsent()
        self._stall = self._protocol.loop.call_later(self._endpoint.write_timeout, self._look_at_progress)

    def resume_writing(self) -> None:
        self._end_stall()
        if self._observer is not None:
            self._observer.resume()

    # A Downstream

    def client(self) -> str:
        found = self._protocol.client
        return found[0] if found else ""

    def observe(self, observer: DownstreamObserver | None) -> None:
        self._observer = observer
        if observer is None:
            return
        if self.disconnected:
            observer.client_gone()
        elif self._stall is not None:
            observer.pause()

    def send_head(self, status: int, headers: list[Header]) -> None:
        """Held until the first bytes, so that both go out in one write."""
        self.response_started = True
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._protocol.default_head()]
        if self._protocol.cors is not None:
            lines.append(self._protocol.cors.lines(self._headers))
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

    def settle(self, then: Callable[[], None]) -> None:
        """Small rests are left to the transport, which a drain waits for (``drain``)."""
        self._observer = self._arrival = None
        if not (self.response_complete or self.disconnected):
            self._transport.close()
        if self._stall is None or self.disconnected:
            then()
        else:
            self._then = then
            self._protocol.tell_when_written(self)

    def settled(self) -> None:
        """What was sent is out, or never will be."""
        self._end_stall()
        then, self._then = self._then, None
        if then is not None:
            then()

    def _close(self) -> None:
        if not self.more_body:
            self._transport.close()
        else:
            self._protocol.close_slowly()

    # A slow client

    def _look_at_progress(self) -> None:
        self._stall = None
        left = self._protocol.unsent()
        if left >= self._stalled_at:
            self._transport.abort()
        else:
            self._stalled_at = left
            self._stall = self._protocol.loop.call_later(self._endpoint.write_timeout, self._look_at_progress)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
