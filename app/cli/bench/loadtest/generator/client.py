"""HTTP/1.1 with as little as it takes: a socket, httptools' parser, and the time of each read.

``requests`` takes most of a millisecond of a core for each request, and hands events on late; what is measured is the
gateway, so what measures must cost less than it does (docs/load-tests.md has the figures). Sockets are gevent's own, so
nothing here depends on what Locust patches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import gevent
import httptools
from gevent import select, socket, ssl

from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.loadtest.hearing import Hearing

READ_BYTES: Final = 65536
SLOW_READ_BYTES: Final = 2048
SLOW_PAUSE_SECONDS: Final = 0.02
CONNECT_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 30.0
"""A connection that lay idle for longer is not used again: the gateway closes its own after 75 s."""


class Base(NamedTuple):
    """Where a server is: the beginning of its URLs, taken apart."""

    host: str
    port: int
    tls: bool
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def base_of(url: str) -> Base:
    """
    Raises:
        ValueError: it is no http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    return Base(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Response:
    """An answer as far as it was read, for httptools' parser. One that is broken off has ``broken``."""

    def __init__(self) -> None:
        self.status = 0
        self.retry_after = False
        self.parts: list[bytes] = []
        self.fresh: list[bytes] = []
        """What the last read brought of the body."""
        self.complete = False
        self.keeps_alive = False
        self.left = False
        self.broken = ""
        self._parser = httptools.HttpResponseParser(self)
        self.begun = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def feed(self, data: bytes) -> bytes:
        """What of the body the read brought.

        Raises:
            httptools.HttpParserError: it is no HTTP.
        """
        self.begun = True
        self.fresh.clear()
        self._parser.feed_data(data)
        self.parts += self.fresh
        return self.fresh[0] if len(self.fresh) == 1 else b"".join(self.fresh)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.fresh.append(data)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keeps_alive = self._parser.should_keep_alive()  # later the parser is ready for the next answer


class Client:
    """One server, and the connections to it that wait for the next request."""

    def __init__(self, base: Base, headers: Mapping[str, str]) -> None:
        self._base = base
        self._tls = ssl.create_default_context() if base.tls else None
        self._addresses: list[tuple[socket.AddressFamily, tuple[str, int]]] = []
        self._idle: deque[tuple[float, socket.socket]] = deque()
        lines = {"host": base.authority, "accept-encoding": "identity", "user-agent": "hotspare-load", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def connect(self, *, receive_buffer: int = 0) -> socket.socket:
        """A new connection.

        Raises:
            OSError: nobody is there.
        """
        base = self._base
        if not self._addresses:  # looked up once: a lookup takes a thread
            found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address[:2]) for family, _, _, _, address in found]
        problem: OSError | None = None
        for family, address in self._addresses:
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                if receive_buffer:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
                connection.settimeout(CONNECT_SECONDS)
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_hostname=base.host)
                connection.settimeout(None)
                return connection
            except OSError as error:
                connection.close()
                problem = error
        raise problem or OSError(f"{base.host} has no address")

    def get(self, path: str, *, seconds: float) -> Response:
        """``broken`` says what went wrong, if anything did."""
        return self._exchange("GET", path, b"", seconds=seconds)

    def ask(self, question: Question, body: bytes, hearing: Hearing, *, seconds: float) -> Response:
        """Send a request and read its answer as its manner says; ``hearing`` hears of streams."""
        return self._exchange("POST", question.path, body, seconds=seconds, question=question, hearing=hearing)

    def request_head(self, method: str, path: str, body: bytes = b"") -> bytes:
        about = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        return f"{method} {self._base.path}{path} HTTP/1.1\r\n{self._head}{about}\r\n".encode()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        seconds: float,
        question: Question | None = None,
        hearing: Hearing | None = None,
    ) -> Response:
        request = self.request_head(method, path, body) + body
        slow = question is not None and question.manner is Manner.SLOW
        response = Response()
        timeout = gevent.Timeout.start_new(seconds)
        try:
            while True:
                kept = None if slow else self._take()
                self._on_connection(kept, request, response, slow=slow, question=question, hearing=hearing)
                if kept is None or response.begun or not response.broken:
                    return response
                response = Response()  # the server closed it just before: the request was not read, and is sent again
        except gevent.Timeout as fired:
            if fired is not timeout:
                raise
            response.broken = f"TimeoutError: not within {seconds:g} s"
            return response
        finally:
            timeout.close()

    def _on_connection(
        self,
        kept: socket.socket | None,
        request: bytes,
        response: Response,
        *,
        slow: bool,
        question: Question | None,
        hearing: Hearing | None,
    ) -> None:
        connection = kept
        try:
            connection = connection or self.connect(receive_buffer=SLOW_READ_BYTES if slow else 0)
            connection.sendall(request)
            self._read(connection, response, slow=slow, question=question, hearing=hearing)
            if response.keeps_alive and not slow:
                self._idle.append((time.monotonic(), connection))
                connection = None
        except (OSError, httptools.HttpParserError) as error:
            response.broken = f"{type(error).__name__}: {error}"
        finally:
            if connection is not None:
                connection.close()

    def _read(
        self,
        connection: socket.socket,
        response: Response,
        *,
        slow: bool,
        question: Question | None,
        hearing: Hearing | None,
    ) -> None:
        streams = question is not None and question.manner is not Manner.WHOLE
        leaves_after = question.leave_after if question is not None and question.manner is Manner.CANCEL else 0
        reads = 0
        while not response.complete:
            data = connection.recv(SLOW_READ_BYTES if slow else READ_BYTES)
            now = time.monotonic()
            if not data:
                response.broken = "the server closed the connection"
                return
            came = response.feed(data)
            if not came:
                continue
            if streams and hearing is not None and response.status == 200:
                hearing.heard(now, came)
            reads += 1
            if leaves_after and reads >= leaves_after and not response.complete:
                response.left, response.broken = True, "the client left"
                return
            if slow:
                gevent.sleep(SLOW_PAUSE_SECONDS)

    def _take(self) -> socket.socket | None:
        """The connection that was used last, if there is one that the server has left open."""
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < IDLE_SECONDS and not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()
        return None
