"""uvicorn on a socket that is ours, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn

from workers.engine import ASGIApp

CLOSE_SECONDS: Final = 1
"""What still runs when the server ends gets this long; whoever owns the server has waited for requests before."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the engine's life decides when a server ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class ServerEnded(Exception):
    """A server ended while it was wanted, or did not start."""


@asynccontextmanager
async def serve_http(app: ASGIApp, sock: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve ``app`` on the listening ``sock`` while inside; the socket is closed at the end.

    Yields the serving task. It ends only with an error while inside: whoever relies on the server watches it.

    Raises:
        ServerEnded: the server did not start.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        log_level="warning",
    )
    server = _Server(config)
    serving = asyncio.create_task(_serve(server, sock))
    started = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        yield serving
    finally:
        started.cancel()
        server.should_exit = True
        await asyncio.wait({serving})


async def _serve(server: _Server, sock: socket.socket) -> None:
    try:
        await server.serve(sockets=[sock])
    except SystemExit as error:  # uvicorn's word for "could not start"
        raise ServerEnded(f"the HTTP server did not start (exit code {error.code})") from error
    finally:
        sock.close()
    if not server.should_exit:
        raise ServerEnded("the HTTP server ended by itself")
