"""The gateway's HTTP/1.1 client: streaming, pooled per replica, made for relaying.

One :class:`UpstreamConnection` carries one request at a time and tells its :class:`UpstreamSink` what comes back: the
head once, then *one call per read* of the socket, however many chunks it held (a call per chunk costs more than twice
as much at the other end). When the connection breaks under a request, the pool's owner is told first and the sink
second, both synchronously: that is how the gateway knows of a worker's death before its watch does.

Answers framed by the end of the connection are not supported: workers frame theirs, and an EOF always means a break.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, cast

import httptools

from app.fleet.address import Address
from app.openai.errors import Header

logger = logging.getLogger(__name__)

IDLE_SECONDS = 4.0
"""Idle connections older than this are not used again; servers commonly close theirs after 5 s."""

STALE_SECONDS = 0.05
"""A reused connection that ends this soon after a request was written, without a byte of answer, was being closed by
the worker as idle: that says nothing about the worker's health."""

DOWN_GRACE_SECONDS = 0.1
"""When a replica is gone, streams still have this long to deliver what is in their socket buffers."""

MAX_HEAD_BYTES = 64 * 1024
"""Of an answer's head, its interim responses included."""

MAX_FRAMING_BYTES = 64 * 1024
"""What may come after a head without a byte of the body: what frames it, and the trailers, which are dropped."""


class Break(StrEnum):
    """How an exchange with a worker failed."""

    REFUSED = "connection refused"
    UNSENT = "connection closed before the request was written"
    CONNECT_TIMEOUT = "connection timed out"
    STALE = "idle connection was closed"
    EOF = "connection closed"
    RESET = "connection reset"
    JUNK = "not HTTP"


class UpstreamError(Exception):
    """A worker's connection failed. ``kind`` says how."""

    def __init__(self, kind: Break) -> None:
        super().__init__(kind.value)
        self.kind = kind


class UpstreamSink(Protocol):
    """Where an answer goes. Called on the event loop; must not raise."""

    def head(self, status: int, headers: list[Header]) -> None: ...

    def read(self, data: bytes, done: bool) -> None:
        """Body bytes of one read; ``done`` with the last ones (``data`` may then be empty)."""
        ...

    def lost(self, error: UpstreamError) -> None:
        """The connection broke before ``done``. Nothing follows."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker. Built by :class:`UpstreamPool`."""

    __slots__ = (
        "_chunks",
        "_done",
        "_framing_bytes",
        "_fresh_head",
        "_head_bytes",
        "_head_complete",
        "_headers",
        "_interim",
        "_on_break",
        "_on_idle",
        "_on_lost",
        "_parser",
        "_paused",
        "_reusable",
        "_reused",
        "_sent_at",
        "_sink",
        "_spoke",
        "_transport",
        "closed",
        "idle_since",
    )

    def __init__(
        self,
        *,
        on_idle: Callable[[UpstreamConnection], None],
        on_break: Callable[[], None],
        on_lost: Callable[[UpstreamConnection], None],
    ) -> None:
        self._on_idle = on_idle
        self._on_break = on_break
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._sink: UpstreamSink | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reusable = False
        self._reused = False
        self._paused = False
        self.closed = False
        self.idle_since = 0.0

    @property
    def busy(self) -> bool:
        return self._sink is not None

    @property
    def usable(self) -> bool:
        """Whether a request can be written. A peer may break a connection at any moment, also right after accepting
        it, so this can change in every turn of the loop."""
        transport = self._transport
        return transport is not None and not self.closed and not transport.is_closing()

    @property
    def paused(self) -> bool:
        return self._paused

    def send(self, data: bytes, sink: UpstreamSink) -> None:
        """Write one request, head and body; the answer goes to ``sink``. Only on an idle connection.

        Raises:
            UpstreamError: ``UNSENT``: the connection is gone, nothing was written, and the sink hears nothing. To the
                caller that is what a failed connect is.
        """
        if self._transport is None or self._sink is not None:
            raise RuntimeError("a request needs an idle connection")
        if not self.usable:
            raise UpstreamError(Break.UNSENT)
        self._sink = sink
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._chunks: list[bytes] = []
        self._head_bytes = self._framing_bytes = 0
        self._done = self._fresh_head = self._head_complete = self._interim = self._spoke = False
        self._sent_at = time.monotonic()
        self._transport.write(data)

    def abort(self) -> None:
        """Drop the connection at once and say nothing more to the sink. Idempotent."""
        self._sink = None
        if self._transport is not None and not self.closed:
            self._transport.abort()

    def lose(self) -> None:
        """Give the connection up as a break: the sink is told."""
        self._break(Break.RESET)

    def pause(self) -> None:
        """Stop reading: the client is slower than the worker."""
        if not self._paused and not self.closed and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self.closed and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        sink, parser = self._sink, self._parser
        if sink is None or parser is None:
            self.abort()  # bytes that nobody asked for: the framing cannot be trusted any more
            return
        self._spoke = True
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break(Break.JUNK)
            return
        if self._parser is None:
            self._break(Break.JUNK)  # bytes after the end of the answer
            return
        if not self._head_complete and self._head_is_too_large(len(data)):
            self._break(Break.JUNK)
            return
        if self._fresh_head:
            self._fresh_head = False
            self._head_complete = True
            try:
                sink.head(parser.get_status_code(), self._headers)
            except Exception:
                self._sink_failed(sink)
            if self._sink is not sink:
                return
        chunks, done = self._chunks, self._done
        if not chunks and not done:
            if self._head_complete and self._is_too_much_framing(len(data)):
                self._break(Break.JUNK)
            return
        if self._framing_bytes:
            self._framing_bytes = 0
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        if done:
            self._finish()
        try:
            sink.read(body, done)
        except Exception:
            self._sink_failed(sink)

    def _sink_failed(self, sink: UpstreamSink) -> None:
        """A bug at the other side of an answer: it ends, as a break, and its request with it."""
        logger.exception("an answer could not be taken")
        self.abort()
        sink.lost(UpstreamError(Break.RESET))

    def _head_is_too_large(self, size: int) -> bool:
        if not self._fresh_head:
            self._head_bytes += size
            return self._head_bytes > MAX_HEAD_BYTES
        if self._head_bytes + size <= MAX_HEAD_BYTES:
            return False
        return sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES  # much more was read

    def _is_too_much_framing(self, size: int) -> bool:
        """The parser joins a trailer's pieces one by one, so that an endless one would cost more with each read."""
        self._framing_bytes += size
        return self._framing_bytes > MAX_FRAMING_BYTES

    def eof_received(self) -> None:
        self._break(Break.EOF)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._break(Break.EOF if exc is None else Break.RESET)
        self._on_lost(self)

    def _break(self, kind: Break) -> None:
        sink = self._sink
        self._sink = None
        if self._transport is not None and not self.closed:
            self._transport.abort()
        if sink is None:
            return
        unheard = self._reused and not self._spoke
        if unheard and kind is not Break.JUNK and time.monotonic() - self._sent_at < STALE_SECONDS:
            kind = Break.STALE
        if kind is not Break.STALE:
            self._on_break()
        sink.lost(UpstreamError(kind))

    def _finish(self) -> None:
        self._sink = None
        self._reused = True
        transport = self._transport
        if transport is None:
            return
        if self._reusable and not transport.is_closing() and not transport.get_write_buffer_size():
            self.resume()
            self.idle_since = time.monotonic()
            self._on_idle(self)
        else:
            transport.abort()

    # httptools callbacks: they only collect, so that nothing can raise inside the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if not (self._fresh_head or self._head_complete):  # else it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._interim = self._parser is not None and self._parser.get_status_code() < 200
        self._fresh_head = not self._interim

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_begin(self) -> None:
        if self._done:
            self._parser = None

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            self._headers = []
        elif self._parser is not None:
            self._done = True
            self._reusable = self._parser.should_keep_alive()  # only known here: the parser forgets it afterwards


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
