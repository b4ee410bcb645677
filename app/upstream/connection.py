"""A connection to a worker: the gateway's HTTP/1.1 client, streaming, made for relaying.

It carries one request at a time and tells its :class:`UpstreamSink` what comes back: the head once, then *one call per
read* of the socket, however many chunks it held (a call per chunk costs more than twice as much at the other end). When
it breaks under a request, the pool's owner is told first and the sink second, both synchronously: that is how the
gateway knows of a worker's death before its watch does.

Answers framed by the end of the connection are not supported: workers frame theirs, and an EOF always means a break.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, cast

import httptools

from app.openai.errors import Header

logger = logging.getLogger(__name__)

STALE_SECONDS = 0.05
"""A reused connection that ends this soon after a request was written, without a byte of answer, was being closed by
the worker as idle: that says nothing about the worker's health."""

RECEIVE_BUFFER_BYTES = 64 * 1024
"""What the kernel takes in of an answer ahead of us (Linux doubles it for its own accounts). It bounds a single read,
and with it what a client that stops reading holds here, over TLS several times: plain, encrypted, not yet written."""

MAX_HEAD_BYTES = 64 * 1024
"""Of an answer's head, its interim responses included."""

_LEAST_HEAD_BYTES = len(b"HTTP/1.1 100 \r\n\r\n")
_VERSIONS = ("1.1", "1.0")

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
    OURS = "an error of the gateway"
    """The sink raised."""


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
    """One connection to a worker. Built by a ``pool``."""

    __slots__ = (
        "_chunks",
        "_done",
        "_framing_bytes",
        "_fresh_head",
        "_head_bytes",
        "_head_complete",
        "_headers",
        "_interim",
        "_interim_bytes",
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
        self._head_bytes = self._interim_bytes = self._framing_bytes = 0
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
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)

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
            self._break(Break.JUNK)  # bytes after the end of the answer, or another version of HTTP
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
        """A bug at the other side of an answer: it ends, and is no break of the worker's."""
        logger.exception("an answer could not be taken")
        self.abort()
        sink.lost(UpstreamError(Break.OURS))

    def _head_is_too_large(self, size: int) -> bool:
        if not self._fresh_head:
            self._head_bytes += size
            return self._head_bytes > MAX_HEAD_BYTES
        if self._head_bytes + size <= MAX_HEAD_BYTES:
            return False
        return self._interim_bytes + _size(self._headers) > MAX_HEAD_BYTES  # much more was read

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
        parser = self._parser
        if parser is None:
            return
        if parser.get_http_version() not in _VERSIONS:
            self._parser = None
            return
        self._interim = parser.get_status_code() < 200
        self._fresh_head = not self._interim

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_begin(self) -> None:
        if self._done:
            self._parser = None

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            self._interim_bytes += _LEAST_HEAD_BYTES + _size(self._headers)
            self._headers = []
        elif self._parser is not None:
            self._done = True
            self._reusable = self._parser.should_keep_alive()  # only known here: the parser forgets it afterwards


def _size(headers: list[Header]) -> int:
    return sum(len(name) + len(value) for name, value in headers)
