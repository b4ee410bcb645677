"""A client's connection: uvicorn's protocol, and what it leaves open. Here what comes in; its requests' turns and its
answers are in ``turns`` and ``output``.

* Its own errors have the envelope of all others.
* A request's head is bounded, in size and in time, and so is what stands between the parts of a body; the body's bounds
  are the endpoint's. What else a head must be: ``request_head``. Trailers are read and dropped: what has been
  checked stays what it was.
* Bytes that are no request are answered at once, in the middle of a body too, and end the connection.
* An offer to upgrade is taken for a WebSocket on the one path that has them (``websocket``). Any other is ignored,
  as RFC 9110 section 7.8 allows. The parser cannot be told so: after a head with an offer it takes the message for
  ended and what follows for another protocol. So such a head is read a second time, by a fresh parser and without the
  offer, and only that second reading starts a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from app.clients.asgi import WRITTEN
from app.clients.connections import SURPLUS_HEAD_SECONDS, Room
from app.clients.direct import DirectCycle, DirectEndpoint
from app.clients.request_head import LOOKED_AT, check_fields, check_target
from app.clients.turns import ClientTurns
from app.clients.websocket import WebSocketProtocol, is_handshake
from app.openai.errors import (
    GatewayError,
    Header,
    head_too_large,
    head_too_slow,
    malformed_request,
    method_not_allowed,
    too_many_connections,
)
from app.security.credentials import OPEN_PATHS

MAX_HEAD_BYTES = 64 * 1024
MAX_FRAMING_BYTES = 16 * 1024
"""Of a body's trailers, or of one chunk's extensions."""
MAX_PIPELINED = 64
"""Requests of one connection that wait for the answer to an earlier one."""
MAX_AHEAD_BYTES = 64 * 1024
"""Of one connection, unread, while requests wait; a read may bring some more."""


class ClientProtocol(ClientTurns):
    """One connection of one client; its requests come one after the other."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_seconds = self.shared.head_seconds
        self._direct = self.shared.direct
        self.entered: Room | None = None
        """Where it was counted among the connections before it was ours: the room it has."""
        self._connections = self.shared.connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_open = False
        """A head has begun and has not ended."""
        self._head_bytes = 0
        """Of what was read while the head was open."""
        self._fields_bytes = 0
        self._looked_at: list[Header] = []
        self._good: tuple[str, list[Header]] = ("", [])
        """Version and fields of the last head that was as it must be and expected nothing."""
        self._framing_bytes = 0
        """Read in the middle of a body, without a byte of it."""
        self._in_message = False
        self._message_ended = False
        """In the current read."""
        self._body_came = False
        """In the current read."""
        self._error: GatewayError | None = None
        """What is wrong with what the parser is reading, if we know better than the parser."""

    # The size and the time of a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._room = self.entered or self._connections.enter()
        if self._room is Room.NONE:
            self._refused = True
            transport.abort()
        elif self._room is Room.SURPLUS:
            self._head_seconds = min(self._head_seconds, SURPLUS_HEAD_SECONDS)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._connections.leave()
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.pipeline or self._ahead:
            self._hold(data)
        else:
            self._read(data)

    def _hold(self, data: bytes) -> None:
        """Requests wait for an earlier answer already: what follows waits unread, up to a bound. The socket is read on
        meanwhile, because only so do we hear that the client has left."""
        if len(self._ahead) < MAX_AHEAD_BYTES:
            self._ahead += data
        else:
            self._refuse(malformed_request(f"more than {MAX_AHEAD_BYTES} bytes of requests wait for their turn"))

    def _read(self, data: bytes) -> None:
        self._message_ended = self._body_came = False
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._error or malformed_request(_reason(error)))
        self._after_read(len(data))

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if not self._answering and is_handshake(method, version, self.url, self.headers):
                    self._upgrade(data[offer.args[0] :])
                    return
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def _upgrade(self, rest: bytes) -> None:
        """The connection is a WebSocket's from here on. ``rest``: what came with the head."""
        protocol = WebSocketProtocol(self.config, self.server_state, self.app_state)
        protocol.socket_transport = self.socket_transport
        try:
            protocol.take_over(self.transport, self.url, self.headers, rest)
            self.connections.discard(self)
            self._refused = True  # nothing that follows is for us
            self._connections.leave()  # sessions have a limit of their own
        except GatewayError as error:
            self._refuse(error)

    def _head_without_offer(self) -> bytes:
        """The head just read, as it was, but for ``upgrade``: the parser takes an offer only with that header."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))

    def _after_read(self, size: int) -> None:
        if self._arriving is not None:
            self._serve(self._arriving)
        if self._refused:
            return
        if self._head_open and not self._message_ended:  # the whole read was of this head
            self._head_bytes += size
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))
                return
        elif self._in_message and not self._head_open:
            self._framing_bytes = 0 if self._body_came else self._framing_bytes + size
            if self._framing_bytes > MAX_FRAMING_BYTES:
                self._refuse(malformed_request(f"more than {MAX_FRAMING_BYTES} bytes between the parts of a body"))
                return
        if self._head_timer is None and (self._head_open or self._idle):
            self._arm()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_message = self._head_open = True
        self._head_bytes = self._fields_bytes = self._framing_bytes = 0
        self._looked_at = []

    def _begin_scope(self) -> None:
        """What uvicorn does when a message begins; only the application needs it."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        self.scope["extensions"] = {WRITTEN: {"wait": self.written}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:
            return  # a trailer
        name = name.lower()
        self._fields_bytes += len(name) + len(value)
        if name in LOOKED_AT:
            self._looked_at.append((name, value))
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._disarm()
        try:
            endpoint = self._check_head()
        except GatewayError as error:
            self._error = error
            raise  # the parser stops, and feeding it raises
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._error = malformed_request(f"more than {MAX_PIPELINED} requests wait for their turn")
            raise self._error  # never said: the answers before it go out, and then the connection ends
        if endpoint is not None:
            self._serve_directly(endpoint)
        else:
            self._begin_scope()
            super().on_headers_complete()
            if self.pipeline:
                self.flow.resume_reading()  # uvicorn would read no more until it is this request's turn

    def _check_head(self) -> DirectEndpoint | None:
        """Who serves this head's request without ASGI, if any does."""
        if len(self.url) + self._fields_bytes > MAX_HEAD_BYTES:
            raise head_too_large(MAX_HEAD_BYTES)
        parser, target = self.parser, self.url
        method: bytes = parser.get_method()
        if self._room is not Room.FREE and target not in OPEN_PATHS:
            self._connections.refused()
            raise too_many_connections(self._connections.limit)
        head = (parser.get_http_version(), self._looked_at)
        if head != self._good:
            self.expect_100_continue = check_fields(*head)
            if not self.expect_100_continue:
                self._good = head
        if method == b"CONNECT":  # always an upgrade, to the parser
            raise method_not_allowed("CONNECT", target.decode("latin-1"), [])
        endpoint = self._direct.get(target) if method == b"POST" else None
        if endpoint is None:
            check_target(method, target)
            if method == b"POST" and b"?" in target:
                return self._direct.get(target.partition(b"?")[0])
        return endpoint

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        cycle: object = self.cycle
        if not isinstance(cycle, DirectCycle):
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.feed(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._message_ended = True
        cycle: object = self.cycle
        if isinstance(cycle, DirectCycle):
            cycle.body_ended()
            if cycle is self._arriving:
                self._serve(cycle)
        else:
            super().on_message_complete()

    @property
    def _idle(self) -> bool:
        return not self._in_message and not self._answering

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self._head_is_due)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_due(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:  # we are not listening: that is not the client's fault
            self._arm()
        elif self._head_open:
            self._refuse(head_too_slow(self._head_seconds))
        elif self._idle:
            self.transport.close()

    # Errors

    def _refuse(self, error: GatewayError) -> None:
        """Answer and close. Within the answer to an earlier request nothing can be said: close after that one."""
        self._refused = True
        self._disarm()
        cycle: object = self.cycle
        if not self._answering:
            self.say(error)
        elif not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif isinstance(cycle, DirectCycle):
            cycle.refuse_body(error)
        elif self.pipeline or self.cycle.response_started:
            self.cycle.keep_alive = False
        else:  # the application waits for the rest of the body: to it, the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.say(error)


def _reason(error: Exception) -> str:
    """What the parser says, where that is a sentence about bytes and not the bytes themselves."""
    return str(error).replace("`", "") if type(error) is httptools.HttpParserError else ""
