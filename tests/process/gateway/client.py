"""A raw HTTP client that keeps what it got, byte by byte, and knows how each answer ended."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass
class Answer:
    asked_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    touched: bool = False
    """Whether a single byte came."""


class Client(asyncio.Protocol):
    """One connection, one request at a time. ``ask`` returns when the answer is complete, or the connection is gone."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer(0)
        self._first: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def connect(self) -> None:
        """Raises:
        ConnectionError: refused or reset.
        """
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self._port)

    async def ask(self, body: dict[str, Any], first: asyncio.Future[None] | None = None) -> Answer:
        """``first`` is resolved with the first event of the answer."""
        assert self._transport is not None
        self._data.clear()
        self._answer = answer = Answer(time.monotonic())
        self._done, self._first = asyncio.get_running_loop().create_future(), first
        data = json.dumps(body).encode()
        self._transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        await self._done
        head, _, rest = bytes(self._data).partition(b"\r\n\r\n")
        answer.touched = bool(self._data)
        if not answer.complete:
            return answer
        status, *lines = head.decode().split("\r\n")
        answer.status = int(status.split()[1])
        answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer.body = _unchunked(rest) if "transfer-encoding" in answer.headers else rest
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._first is not None and b"data: " in self._data:
            self._first.set_result(None)
            self._first = None
        if self._data.endswith(b"\r\n0\r\n\r\n") or self._length_reached():
            self._answer.complete = True
            self._finish()

    def _length_reached(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        at = self._data.find(b"content-length: ", 0, max(0, end))
        if at < 0:
            return False
        length = int(self._data[at + 16 : self._data.index(b"\r\n", at)])
        return len(self._data) >= end + 4 + length

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _unchunked(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]
