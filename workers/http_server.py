"""uvicorn on a socket that is ours, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import MethodType
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workers.asgi import Receive, Scope, Send
from workers.engine import ASGIApp

CLOSE_SECONDS: Final = 1
"""What still runs when the server ends gets this long; whoever owns the server has waited for requests before."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which would warn at each request that asks for an upgrade, and advise to install a library. Such a
    request is answered as any other (RFC 9110, 7.8), and whoever reaches the port must not fill the log."""

    def _unsupported_upgrade_warning(self) -> None:
        pass


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


class HttpServer:
    """A server that runs. ``ended`` is done when it serves no more: with an error, unless it was told to end."""

    def __init__(self, server: _Server, ended: asyncio.Task[None]) -> None:
        self._server = server
        self.ended = ended

    def stop_listening(self) -> None:
        """Free the port. The connections that there are stay, and are served."""
        for listener in self._server.servers:
            listener.close()

    def cut_request(self, scope: Scope) -> None:
        """End the connection of the request that the application was given as ``scope`` now, in the middle of whatever
        it carries, if it is still that one's."""
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "scope", None) is scope:
                connection.transport.abort()


_CYCLE: Final = ("response_complete", "transport")
"""What uvicorn's object for one request has, whose method ``send`` is: see ``_break_off``."""
_CONNECTION: Final = ("scope", "transport")
"""What its object for one connection has: see ``cut_request``."""


def misfit() -> str | None:
    """What is assumed here of uvicorn beyond its documentation and is not so, a sentence, or None. Looked at before any
    engine starts: without it, answers that break off could not be told from whole ones."""
    missing = [
        f"{made.__name__}.{name}"
        for made, names in ((httptools_impl.RequestResponseCycle, _CYCLE), (HttpToolsProtocol, _CONNECTION))
        for name in names
        if name not in made.__init__.__code__.co_names
    ]
    if not inspect.isfunction(getattr(httptools_impl.RequestResponseCycle, "send", None)):
        missing.append("RequestResponseCycle.send")
    return f"uvicorn {uvicorn.__version__} does not fit: it has no {', '.join(missing)}" if missing else None


class ServerEnded(Exception):
    """A server ended while it was wanted, or did not start."""


@asynccontextmanager
async def serve_http(app: ASGIApp, sock: socket.socket) -> AsyncIterator[HttpServer]:
    """Serve ``app`` on the listening ``sock`` while inside; the socket is closed at the end, if not before.

    While inside it ends only with an error: whoever relies on the server watches ``ended``.

    Raises:
        ServerEnded: the server did not start.
    """
    config = uvicorn.Config(
        _answered_by(app),
        http=_Protocol,
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
        yield HttpServer(server, serving)
    finally:
        started.cancel()
        server.should_exit = True
        await asyncio.wait({serving})


def _answered_by(app: ASGIApp) -> ASGIApp:
    """``app``, and nobody in its place: uvicorn would write a 500 of its own for what is cancelled, or returns, without
    an answer. The connection breaks off instead, which tells a gateway to go on elsewhere."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            _break_off(send)
            raise
        _break_off(send)

    return answered


def _break_off(send: Send) -> None:
    """End the connection whose ``send`` this is, if its answer is not whole."""
    cycle: Any = cast(MethodType, send).__self__
    if not cycle.response_complete:
        cycle.transport.abort()


async def _serve(server: _Server, sock: socket.socket) -> None:
    try:
        await server.serve(sockets=[sock])
    except SystemExit as error:  # uvicorn's word for "could not start"
        raise ServerEnded(f"the HTTP server did not start (exit code {error.code})") from error
    finally:
        sock.close()
    if not server.should_exit:
        raise ServerEnded("the HTTP server ended by itself")
