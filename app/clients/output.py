"""A client's connection, its outgoing half: refusals, the end of a connection, and when all is out."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.clients.config import WRITE_BUFFER_BYTES, ClientConfig
from app.openai.errors import GatewayError
from app.relay.headers import client_request_id

LINGER_SECONDS: Final = 2.0
"""How long a client that was answered before its body ended is read on: closing at once could take the answer away from
it (RFC 9112, section 9.6)."""
TLS_LOOK_SECONDS = 0.02


class ClientOutput(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        if not isinstance(config, ClientConfig):
            raise TypeError("this protocol needs a ClientConfig")
        self.shared = config
        self.cors = config.cors
        self._default_headers: list[tuple[bytes, bytes]] | None = None
        self._default_head = b""
        self._lost = False
        self.socket_transport: asyncio.Transport | None = None
        """The one under ``transport``, where that one is TLS."""

    def default_head(self) -> bytes:
        """The lines that every answer has."""
        current = self.server_state.default_headers
        if current is not self._default_headers:
            self._default_headers = current
            self._default_head = b"".join(b"%b: %b\r\n" % header for header in current)
        return self._default_head

    def say(self, error: GatewayError) -> None:
        """Answer with this error, and end the connection."""
        if self.shared.on_refusal is not None:
            self.shared.on_refusal(error.code)
        body = error.body
        request_id = client_request_id(self.headers or ()) or self.shared.ids.new()
        lines = b"".join(b"%b: %b\r\n" % header for header in error.headers if header[0] != b"connection")
        if self.cors is not None:
            lines += self.cors.lines(self.headers or ())
        self.transport.write(
            b"HTTP/1.1 %d %b\r\n%b%bcontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            b"connection: close\r\n\r\n%b"
            % (
                error.status,
                HTTPStatus(error.status).phrase.encode(),
                self.default_head(),
                lines,
                len(body),
                request_id,
                body,
            )
        )
        self.close_slowly()

    def close_slowly(self) -> None:
        """End what we send, and read on for a moment: closing while bytes arrive could take the answer away from the
        client (RFC 9112, section 9.6)."""
        if self.transport.can_write_eof():  # TLS has no half of a close
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def last_answer(self) -> None:
        """The connection ends after the answer being made, if its head can still say so. A client that was promised
        more gets an answer to its next request, too."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def cut(self) -> bool:
        """Close at once if something was not yet taken; returns whether that was so."""
        if self._lost or not self.unsent():
            return False
        self.transport.abort()
        return True

    async def written(self, patience: float) -> None:
        """An ``asgi.Written``. Returns too when the connection is gone."""
        await asyncio.sleep(0)  # what fits into the socket is there at the end of this turn of the loop
        left = 0 if self._lost else self.unsent()
        if not left:
            return
        if self.socket_transport is not None:
            await self._written_in_tls(patience)
            return
        self.transport.set_write_buffer_limits(high=0)  # so that "may write again" means that all is written
        try:
            while left:
                try:
                    async with asyncio.timeout(patience):
                        await self.flow.drain()
                    return
                except TimeoutError:
                    before, left = left, self.transport.get_write_buffer_size()
                    if left >= before:
                        self.transport.abort()
                        return
        finally:
            if not self._lost:
                self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    async def _written_in_tls(self, patience: float) -> None:
        """Nobody tells when the transport under TLS has written all, so this looks."""
        left, since = self.unsent(), self.loop.time()
        while left and not self._lost:
            await asyncio.sleep(TLS_LOOK_SECONDS)
            before, left = left, self.unsent()
            if left < before:
                since = self.loop.time()
            elif left and self.loop.time() - since >= patience:
                self.transport.abort()
                return

    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        under = self.socket_transport
        return self.transport.get_write_buffer_size() + (0 if under is None else under.get_write_buffer_size())
