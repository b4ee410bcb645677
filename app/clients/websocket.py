"""A WebSocket of the server: uvicorn's protocol over websockets' sans-IO core, and what it leaves open.

* Which heads open one, and how the connection passes from the server's HTTP protocol.
* A handshake that is refused is answered with the envelope of all other errors.
* A connection that is to be closed is closed: a client that does not read, or that does not answer a close or a ping,
  would keep uvicorn's waiting for its buffer to empty.
* A client that does not read is not read from: it could ask for pongs without end.
* A drain can wait until the client has seen the close.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Sequence
from typing import Any, Final

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Response
from websockets.server import ServerProtocol

from app.openai.errors import Header, bad_handshake, head_too_large, malformed_request, upgrade_required

PATH: Final = b"/v1/realtime"
PING_SECONDS: Final = 20.0
"""After so long a client is asked whether it lives, and after as long again without an answer it is given up."""
CLOSE_SECONDS: Final = 5.0
"""How long a client has to answer a close, or to take what was written before it."""
GOODBYE_SECONDS: Final = 1.0
"""How long a drain waits for that."""
MAX_LINE_BYTES: Final = 8000
MAX_HEADERS: Final = 120
"""Of a handshake: within what websockets' own parser takes."""


def is_handshake(method: bytes, version: str, target: bytes, headers: Sequence[Header]) -> bool:
    """Whether a head opens a WebSocket: on its path, and without a body."""
    if target.partition(b"?")[0] != PATH or method != b"GET" or version != "1.1":
        return False
    if any(name in (b"content-length", b"transfer-encoding") for name, _ in headers):
        return False
    return [value.lower() for name, value in headers if name == b"upgrade"] == [b"websocket"]


class _Handshakes(ServerProtocol):
    """Refuses in the envelope."""

    def reject(self, status: int | http.HTTPStatus, text: str) -> Response:
        reason = text.partition("\n")[0]
        error = upgrade_required("This") if status == 426 else bad_handshake(int(status), reason)
        response = super().reject(status, error.body.decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Handshakes(max_size=config.ws_max_size, logger=self.logger)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self.socket_transport: asyncio.Transport | None = None
        """The one under ``transport``, where that one is TLS."""

    def take_over(
        self, transport: asyncio.Transport, target: bytes, headers: Sequence[Header], rest: bytes = b""
    ) -> None:
        """Go on with a connection whose head was read already. ``rest``: what came after it.

        Raises:
            GatewayError: it is to be refused; the transport is the caller's as before.
        """
        if max(len(target), *(len(name) + len(value) for name, value in headers)) > MAX_LINE_BYTES:
            raise head_too_large(MAX_LINE_BYTES)
        if len(headers) > MAX_HEADERS:
            raise malformed_request(f"a handshake has at most {MAX_HEADERS} headers")
        self.connection_made(transport)
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.data_received(b"GET %b HTTP/1.1\r\n%b\r\n%b" % (target, b"".join(lines), rest))
        if not self.handshake_initiated:
            self.connections.discard(self)
            raise malformed_request("a header of the handshake is not one")
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        pongs = self.conn.data_to_send()
        if pongs and not self.transport.is_closing():
            self.transport.write(b"".join(pongs))

    def handle_ping(self) -> None:
        """Its answer leaves with the others of this read: each of its own would cost many times its bytes."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_if_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_if_read()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self._read_if_read()
        return message

    def _read_if_read(self) -> None:
        if self.transport.is_closing():
            return
        if not self.writable.is_set():
            self.transport.pause_reading()
        elif not self.read_paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._lost.done():
            self._lost.set_result(None)

    # A connection to the drain, which closes sessions on its own

    def last_answer(self) -> None:
        pass

    async def written(self, patience: float) -> None:
        """A close has been answered, or was not within a moment."""
        await asyncio.wait([self._lost], timeout=min(patience, GOODBYE_SECONDS))

    def cut(self) -> bool:
        if self._lost.done():
            return False
        under = self.socket_transport
        unsent = self.transport.get_write_buffer_size() + (0 if under is None else under.get_write_buffer_size())
        self.transport.abort()
        return unsent > 0

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._abort_later()
        elif message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # it was answered; uvicorn would log an error that it was not

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            if self.close_timer is None:
                self._abort_later()

    def _abort_later(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = None
        if not self.disconnected:
            self.close_timer = self.loop.call_later(CLOSE_SECONDS, self.transport.abort)
