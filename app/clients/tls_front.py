"""A client's connection until its TLS handshake is done; then the protocol of all clients takes over.

The listener could do the handshake itself, but then nobody could reach the socket's own transport behind the TLS one:
it takes whatever fits into no socket and says nothing of it, while a drain, and the look at slow clients, must know
what has not left yet.

TLS can only be put onto a transport that reads already (uvloop's begins to once ``connection_made`` has returned), so
the client's first bytes may come too early, and are handed on.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn import Config
from uvicorn.server import ServerState

from app.clients.config import WRITE_BUFFER_BYTES, ClientConfig
from app.clients.connections import SURPLUS_HEAD_SECONDS, Room
from app.clients.protocol import ClientProtocol

SHUTDOWN_SECONDS = 2.0
"""How long a client may take to say goodbye in TLS when its connection is closed."""


class TlsFront(asyncio.Protocol):
    """Stands among uvicorn's connections during the handshake, so that its shutdown ends it, too. It counts from its
    first moment: the room it got then is its client's."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not isinstance(config, ClientConfig) or config.tls is None:
            raise TypeError("this protocol needs a ClientConfig with TLS")
        self._context = config.tls.context
        self._seconds = config.handshake_seconds
        self._client = ClientProtocol(config, server_state, app_state, _loop)
        self._connections = cast("set[object]", server_state.connections)
        self._count = config.connections
        self._tasks = server_state.tasks
        self._early: list[bytes] = []
        """Came before TLS was there; later, with the end of the handshake."""
        self._lost = False
        self._handshake: asyncio.Task[asyncio.Transport | None] | None = None
        self._raw: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._raw is not None:
            return
        self._raw = cast(asyncio.Transport, transport)
        room = self._client.entered = self._count.enter()
        if room is Room.NONE:
            self._count.leave()
            self._raw.abort()
            return
        if room is Room.SURPLUS:
            self._seconds = min(self._seconds, SURPLUS_HEAD_SECONDS)
        self._connections.add(self)
        task = asyncio.get_running_loop().create_task(self._shake_hands(self._raw))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def shutdown(self) -> None:
        """As uvicorn says it to a connection."""
        self._lost = True
        if self._raw is not None:
            self._raw.abort()
        if self._handshake is not None:  # it would go on waiting for a client that is gone
            self._handshake.cancel()

    async def _shake_hands(self, raw: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        transport: asyncio.Transport | None = None
        try:
            if not self._lost:
                handshake = self._handshake = loop.create_task(self._start_tls(raw))
                await asyncio.sleep(0)  # it takes its first step: from now on TLS reads what comes
                loop.call_soon(self._hand_on, raw)  # behind what that step has put there
                transport = await handshake
        except OSError:
            pass  # too slow, gone, or no TLS
        finally:
            self._connections.discard(self)
            if transport is None or self._lost:
                self._count.leave()
                raw.abort()
        if transport is None or self._lost:
            return
        client = self._client
        client.socket_transport = raw
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.set_protocol(client)
        client.connection_made(transport)
        if self._early:
            client.data_received(b"".join(self._early))

    async def _start_tls(self, raw: asyncio.Transport) -> asyncio.Transport | None:
        return await asyncio.get_running_loop().start_tls(
            raw,
            self,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._seconds,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )

    def _hand_on(self, raw: asyncio.Transport) -> None:
        """What came before TLS was there."""
        tls = cast(asyncio.BufferedProtocol, raw.get_protocol())
        rest = memoryview(b"".join(self._early))
        self._early.clear()
        while rest and not raw.is_closing():
            buffer = memoryview(tls.get_buffer(len(rest)))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            tls.buffer_updated(size)
            rest = rest[size:]
