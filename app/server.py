"""The HTTP server: uvicorn's, with a drain.

A signal asks for a drain and closes nothing: while it lasts, probes and new requests are still answered (503
``draining``), so that nobody sees a refused connection before load balancers have noticed. When nothing is in flight
any more, or the drain's time is over, the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

from uvicorn import Server

from app import compiled
from app.address import Address
from app.application import GatewayApp
from app.clients.config import ClientConfig
from app.clients.protocol import ClientProtocol
from app.clients.tls_front import TlsFront
from app.clients.websocket import PING_SECONDS, WebSocketProtocol
from app.drain import Drain
from app.exit_codes import DRAINED, OVERRAN
from app.lifecycle import Lifecycle, LifecycleEvent
from app.processes.listener import BACKLOG
from app.processes.stop_signals import STOPS, heard

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
"""uvicorn counts on so many: each tenth one renews the ``date`` header."""
CLOSING_SECONDS = 1.0
"""How long connections have to end after everything was said on them."""

WEBSOCKET_FACTOR = 2
"""A message of a WebSocket that is so many times larger than an event may be is not read to its end."""


def is_loopback(host: str) -> bool:
    """Of an address as a socket names it."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


class GatewayServer(Server):
    """Serves one :class:`GatewayApp` until it is drained. ``exit_code`` says how that went.

    ``on_drained`` is waited for when nothing is in flight any more; until it returns the server answers as it does in a
    drain."""

    def __init__(
        self,
        app: GatewayApp,
        *,
        on_listening: Callable[[], None] | None = None,
        on_drained: Callable[[], Awaitable[None]] | None = None,
        on_forced_exit: Callable[[], None] | None = None,
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        settings = app.gateway.settings
        self._ending = asyncio.Event()
        super().__init__(
            ClientConfig(
                app,
                head_seconds=settings.head_timeout_seconds,
                direct=app.direct,
                ids=app.ids,
                cors=app.cors,
                connections=app.connections,
                on_refusal=app.gateway.metrics.unrouted_error,
                tls=app.gateway.access.tls,
                handshake_seconds=app.gateway.settings.tls_handshake_timeout_seconds,
                http=ClientProtocol if app.gateway.access.tls is None else TlsFront,
                loop="uvloop",
                ws=WebSocketProtocol,
                ws_max_size=WEBSOCKET_FACTOR * app.gateway.settings.max_realtime_event_bytes,
                ws_ping_interval=ping_seconds,
                ws_ping_timeout=ping_seconds,
                ws_per_message_deflate=False,
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive_seconds,
            )
        )
        self._gateway = app.gateway
        self._on_listening = on_listening
        self._on_drained = on_drained
        self._on_forced_exit = on_forced_exit
        self._drain: asyncio.Task[None] | None = None
        self.exit_code = DRAINED

    @property  # to uvicorn a plain attribute, looked at ten times a second
    def should_exit(self) -> bool:
        return self._ending.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._ending.set()
        else:
            self._ending.clear()

    async def main_loop(self) -> None:
        """uvicorn's, but that the end is noticed at once."""
        tick = 0
        while not await self.on_tick(tick):
            tick += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled on the loop, between callbacks; uvicorn's way would raise them again at the end."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in STOPS}
        for number in before:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            with heard():
                yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if compiled.used():
            logger.info("the way of requests runs compiled")
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            tls = self._gateway.access.tls
            logger.info("listening on %s://%s", "http" if tls is None else "https", Address(host, port))
            if tls is not None:
                logger.info("the TLS certificate is %s", tls.validity)
            if self._gateway.access.keys is None and not is_loopback(host):
                logger.warning(
                    "%s can be reached from other machines, and no API keys are set: everybody who reaches it may use "
                    "it; see HOTSPARE_API_KEYS_FILE",
                    Address(host, port),
                )

        if self._on_listening is not None:
            self._on_listening()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._drain is None:
            self.request_drain(name)
            return
        logger.warning("%s again: leaving at once", name)
        if self._on_forced_exit is not None:
            self._on_forced_exit()
        logging.shutdown()
        os._exit(OVERRAN)

    def request_drain(self, reason: str = "asked to") -> None:
        """Start to drain. Idempotent; the server ends by itself afterwards."""
        if self._drain is None:
            self._gateway.lifecycle.fire(LifecycleEvent.DRAIN)
            self._drain = asyncio.get_running_loop().create_task(self._run_drain(reason))

    async def _run_drain(self, reason: str) -> None:
        gateway = self._gateway
        drain = Drain(
            gateway.drain,
            gateway.admission,
            gateway.sessions,
            timeout=gateway.settings.drain_timeout_seconds,
            write_timeout=gateway.settings.client_write_timeout_seconds,
            interrupt_all=gateway.interrupt_all,
            connections=self._connections,
        )
        try:
            if not await drain.run(reason):
                self.exit_code = OVERRAN
            if self._on_drained is not None:
                await self._on_drained()
        except Exception:
            logger.exception("the drain failed: leaving without it")
            self.exit_code = OVERRAN
        finally:
            gateway.lifecycle.fire(LifecycleEvent.DRAINED)
            self.should_exit = True

    def _connections(self) -> list[ClientProtocol | WebSocketProtocol]:
        found: set[object] = set(self.server_state.connections)
        return [connection for connection in found if isinstance(connection, ClientProtocol | WebSocketProtocol)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does, without its pauses: whatever had to be waited for has been, by the drain."""
        for listening in self.servers:
            listening.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn's sets
                    await asyncio.sleep(0.005)
                for listening in self.servers:
                    await listening.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()
        if self._gateway.lifecycle.state is Lifecycle.STOPPING:
            self._gateway.lifecycle.fire(LifecycleEvent.CLOSED)
