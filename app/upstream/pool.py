"""The connections to one replica: those that carry a request, those that wait for one, and those being opened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.address import Address
from app.upstream.connection import Break, UpstreamConnection, UpstreamError

IDLE_SECONDS = 4.0
"""Idle connections older than this are not used again; servers commonly close theirs after 5 s."""

DOWN_GRACE_SECONDS = 0.1
"""When a replica is gone, streams still have this long to deliver what is in their socket buffers."""


class UpstreamPool:
    """The connections to one replica: one (worker, instance, epoch) at one address.

    ``on_break`` is called when a connection breaks under a request, before that request hears of it.
    """

    def __init__(self, address: Address, *, connect_timeout: float, on_break: Callable[[], None]) -> None:
        self._address = address
        self.host_header = str(address).encode("ascii", "replace")
        self._connect_timeout = connect_timeout
        self._on_break = on_break
        self._idle: dict[UpstreamConnection, None] = {}
        self._all: set[UpstreamConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._retired = False
        self._on_finished: Callable[[], None] | None = None

    @property
    def address(self) -> Address:
        return self._address

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection that nobody wants after all, if it is any good."""
        if connection.usable and not connection.busy:
            connection.idle_since = time.monotonic()
            self._keep(connection)
        else:
            connection.abort()

    def take(self) -> UpstreamConnection | None:
        """An idle connection, the most recently used one, or ``None``."""
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.idle_since >= oldest and connection.usable:
                return connection
            connection.abort()
        return None

    def open(self) -> asyncio.Future[UpstreamConnection]:
        """A new connection, or :class:`UpstreamError` within the connect timeout.

        If whoever asked has gone when it is there, it is kept for the next one.
        """
        future: asyncio.Future[UpstreamConnection] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._open(future))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return future

    @property
    def busy(self) -> bool:
        """Whether a request has a connection, or is about to."""
        return bool(self._all)

    def finish(self, on_finished: Callable[[], None]) -> None:
        """No more requests: drop idle connections now, each of the others after its answer. ``on_finished`` is called
        after the last one."""
        self._retired = True
        self._on_finished = on_finished
        for connection in list(self._idle):
            connection.abort()

    def retire(self) -> None:
        """The replica is gone: drop idle connections now, and the others once they had time to deliver the rest."""
        self._retired = True
        for connection in list(self._all):
            if not connection.busy:
                connection.abort()
        if self._all:
            asyncio.get_running_loop().call_later(DOWN_GRACE_SECONDS, self._abort_silent)

    def close(self) -> None:
        """Drop everything at once."""
        self._retired = True
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._all):
            connection.abort()

    def _abort_silent(self) -> None:
        for connection in list(self._all):
            # A paused one has bytes of its own to deliver when its client is ready; it will read its EOF after them.
            if not connection.paused:
                connection.lose()

    def _connection(self) -> UpstreamConnection:
        connection = UpstreamConnection(on_idle=self._keep, on_break=self._on_break, on_lost=self._forget)
        self._all.add(connection)
        return connection

    def _forget(self, connection: UpstreamConnection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)
        if self._on_finished is not None and not self._all:
            self._on_finished()

    def _keep(self, connection: UpstreamConnection) -> None:
        if self._retired:
            connection.abort()
        else:
            self._idle[connection] = None

    async def _open(self, future: asyncio.Future[UpstreamConnection]) -> None:
        loop = asyncio.get_running_loop()
        connection = self._connection()
        error = UpstreamError(Break.REFUSED)
        opened = False
        try:
            async with asyncio.timeout(self._connect_timeout):
                await loop.create_connection(lambda: connection, self._address.host, self._address.port)
            opened = True
        except TimeoutError:
            error = UpstreamError(Break.CONNECT_TIMEOUT)
        except OSError:
            pass
        finally:
            if not opened:
                self._forget(connection)
                connection.abort()
            if not opened and not future.done():
                future.set_exception(error)
        if not opened:
            return
        if self._retired:  # whoever answers at this address now is another one
            connection.abort()
            if not future.done():
                future.set_exception(UpstreamError(Break.REFUSED))
        elif not future.done():
            future.set_result(connection)
        else:
            self.give_back(connection)
