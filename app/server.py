"""The HTTP server: uvicorn's, with a drain.

A signal asks for a drain and closes nothing: while it lasts, probes and new requests are still answered (503
``draining``), so that nobody sees a refused connection before load balancers have noticed. When nothing is in flight
any more, or the drain's time is over, the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

from uvicorn import Server

from app.address import Address
from app.client_protocol import HEAD_SECONDS, ClientConfig, ClientProtocol
from app.factory import GatewayApp
from app.lifecycle import Lifecycle, LifecycleEvent
from app.openai.errors import drain_overran

logger = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_OVERRAN = 70
BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75
"""Idle client connections; longer than common proxies keep theirs, so that they close first."""
LAST_WORDS_SECONDS = 2.0
"""How long clients have to take the error events that end their streams when the drain's time is over."""


class GatewayServer(Server):
    """Serves one :class:`GatewayApp` until it is drained. ``exit_code`` says how that went."""

    def __init__(
        self,
        app: GatewayApp,
        *,
        on_forced_exit: Callable[[], None] | None = None,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        super().__init__(
            ClientConfig(
                app,
                head_seconds=head_seconds,
                direct=app.direct,
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self._gateway = app.gateway
        self._on_forced_exit = on_forced_exit
        self._drain: asyncio.Task[None] | None = None
        self.exit_code = EXIT_DRAINED

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled on the loop, between callbacks; uvicorn's way would raise them again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            logger.info("listening on http://%s", Address(host, port))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._drain is None:
            logger.info("%s: draining, at most %g s", name, self._gateway.settings.drain_timeout_seconds)
            self.request_drain()
            return
        logger.warning("%s again: leaving at once", name)
        if self._on_forced_exit is not None:
            self._on_forced_exit()
        logging.shutdown()
        os._exit(EXIT_OVERRAN)

    def request_drain(self) -> None:
        """Start to drain. Idempotent; the server ends by itself afterwards."""
        if self._drain is None:
            self._gateway.lifecycle.fire(LifecycleEvent.DRAIN)
            self._drain = asyncio.get_running_loop().create_task(self._run_drain())

    async def _run_drain(self) -> None:
        gateway = self._gateway
        try:
            async with asyncio.timeout(gateway.settings.drain_timeout_seconds):
                await self._until_idle()
        except TimeoutError:
            cut = gateway.relay.interrupt_all(drain_overran())
            logger.warning("drain time is over: ended %d requests", cut)
            try:
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await self._until_idle()
            except TimeoutError:
                logger.warning("%d requests did not end", gateway.admission.inflight)
                self.exit_code = EXIT_OVERRAN
        gateway.lifecycle.fire(LifecycleEvent.DRAINED)
        self.should_exit = True

    async def _until_idle(self) -> None:
        """Nothing is in flight, and answers that are complete have left for their readers, slow ones too."""
        await self._gateway.admission.wait_idle()
        patience = self._gateway.settings.client_write_timeout_seconds
        connections = [c for c in self.server_state.connections if isinstance(c, ClientProtocol)]
        await asyncio.gather(*(connection.written(patience) for connection in connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._gateway.lifecycle.state is Lifecycle.STOPPING:
            self._gateway.lifecycle.fire(LifecycleEvent.CLOSED)
