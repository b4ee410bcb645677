"""A client's connection, between heads and answers: its requests come one after the other, and each has its turn.

Relayed requests are served here (``direct``), all others by the ASGI application. An endpoint of the application can
wait until its answer has left this process, not only its own queue: ``asgi.WRITTEN``.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from app.clients.asgi import AsgiApp, Message, Receive, Scope, Send
from app.clients.config import WRITE_BUFFER_BYTES
from app.clients.connections import Room
from app.clients.direct import DirectCycle, DirectEndpoint
from app.clients.output import ClientOutput


class ClientTurns(ClientOutput):
    """``protocol`` says which request came, and what of its body."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._room = Room.FREE
        self._refused = False
        """Nothing more is read."""
        self._ending = False
        """The connection ends with the answer being made."""
        self._arriving: DirectCycle | None = None
        """Its head is complete, and it is its turn; it starts with its body, or when this read is over."""
        self._serving: DirectCycle | None = None
        """The one that is being answered."""
        self._applying: RequestResponseCycle | None = None
        """The one that the application answers."""
        self._ahead = b""
        """Bytes that came while requests waited for their turn."""
        self._unwritten: list[DirectCycle] = []

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving = None
        cycles: list[object] = [self._serving, *(cycle for cycle, _ in self.pipeline), self.cycle, *self._unwritten]
        self._unwritten = []
        for cycle in cycles:
            if isinstance(cycle, DirectCycle):
                cycle.gone()
        if self._applying is not None and not self._applying.response_complete:
            self._applying.disconnected = True
            self._applying.message_event.set()
        super().connection_lost(exc)
        # Whatever still holds this connection shall not hold its requests and their bodies.
        self._serving = self._applying = self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()
        self._ahead = b""

    # Whose turn it is

    @property
    def _answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before the first request
        return cycle is not None and not cycle.response_complete

    def _serve_directly(self, endpoint: DirectEndpoint) -> None:
        """What uvicorn does with a request, but with a cycle of ours."""
        chunks = self.parser.get_http_version() == "1.1"
        before = cast("RequestResponseCycle | None", self.cycle)
        cycle = DirectCycle(
            self,
            endpoint,
            target=self.url,
            headers=self.headers,
            keep_alive=chunks and self.parser.should_keep_alive(),
            chunks=chunks,
            expects_continue=self.expect_100_continue,
        )
        self.cycle = cast(RequestResponseCycle, cycle)
        if before is None or before.response_complete:
            self._arriving = cycle
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _serve(self, cycle: DirectCycle) -> None:
        self._arriving = None
        self._serving = cycle
        cycle.start()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """uvicorn's way to begin with a request whose turn has come: of ours, that is one of a pipeline."""
        ours: object = cycle
        if isinstance(ours, DirectCycle):
            self.loop.call_soon(self._serve, ours)
        else:
            self._serving, self._applying = None, cycle
            super()._start_asgi_task(cycle, cast(Any, self._ending_early(cycle, app)))

    def _ending_early(self, cycle: RequestResponseCycle, app: Any) -> AsgiApp:
        """Where an answer begins before its request's body has ended, nobody knows where that would end: a client that
        was not asked to go on may leave it out. So the connection ends with the answer."""

        async def ending(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_and_look(message: Message) -> None:
                if message["type"] == "http.response.start" and cycle.keep_alive and self._is_last(cycle):
                    kept = [header for header in message["headers"] if header[0] != b"connection"]
                    message["headers"] = [*kept, (b"connection", b"close")]
                    await send(message)
                    cycle.keep_alive = self._ending = True  # it would close at once, and not slowly
                else:
                    await send(message)

            await app(scope, receive, send_and_look)

        return ending

    def _is_last(self, cycle: RequestResponseCycle) -> bool:
        return cycle.more_body or self._room is not Room.FREE

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. Whether it still reads nobody can tell: a close looks the same. Who asked for an
        answer that costs a worker is taken to be gone, as proxies do; what is answered at once is answered."""
        cycle: object = self.cycle
        if not isinstance(cycle, RequestResponseCycle) or cycle.response_complete or cycle.more_body or self.pipeline:
            return None
        if cycle.scope["method"] not in ("GET", "HEAD", "OPTIONS") or not self.transport.can_write_eof():
            return None
        self._refused = self._ending = True
        return True

    def on_response_complete(self) -> None:
        if not self._ending:
            super().on_response_complete()
            if self._ahead and not self.pipeline:
                self.loop.call_soon(self._read_on)
            return
        self._refused = True  # what follows is no request, and what waits for its turn does not get one
        self._ahead = b""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.close_slowly()

    def _read_on(self) -> None:
        data, self._ahead = self._ahead, b""
        if data and not self._lost:
            self.data_received(data)

    # What is written

    def tell_when_written(self, cycle: DirectCycle) -> None:
        """Call ``cycle.settled`` when the transport has nothing left to write, or is lost."""
        self._unwritten.append(cycle)
        self.transport.set_write_buffer_limits(high=0)  # so that "may write again" means that all is written

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._serving is not None:
            self._serving.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._serving is not None:
            self._serving.resume_writing()
        if self._unwritten:
            written, self._unwritten = self._unwritten, []
            self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            for cycle in written:
                cycle.settled()
