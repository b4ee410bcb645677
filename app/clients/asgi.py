"""The ASGI shell over the relay: a raw ASGI endpoint per relayed route, without request or response objects."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app.openai.errors import Header
from app.relay.downstream import DownstreamObserver

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,64}")
HIGH_WATER_BYTES = 256 * 1024
LOW_WATER_BYTES = 64 * 1024

WRITTEN = "hotspare.written"
"""An extension of the server: ``scope["extensions"][WRITTEN]["wait"]`` is a :data:`Written`."""

Written = Callable[[float], Awaitable[None]]
"""Waits until the socket has taken all that was sent. A client that takes nothing for so many seconds is cut off."""


def client_of(scope: Scope) -> str:
    """The client's address, as the server has it. Empty if it has none, or one that is none: a server that believes
    proxies may have it from a header."""
    found = str((scope.get("client") or ("",))[0])
    return found if _ADDRESS.fullmatch(found) else ""


class AsgiDownstream:
    """A ``Downstream`` that queues, and sends while its endpoint waits (:meth:`run`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, write_timeout: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._write_timeout = write_timeout
        self._written: Written | None = scope.get("extensions", {}).get(WRITTEN, {}).get("wait")
        self._observer: DownstreamObserver | None = None
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._ended = False
        self._gone = False
        self._wake: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._then: Callable[[], None] | None = None
        self._closed = False

    def watch_client(self) -> None:
        """Start to look for the client's leaving; after the body was read."""
        self._watcher = asyncio.create_task(self._watch())

    def client(self) -> str:
        return client_of(self._scope)

    def observe(self, observer: DownstreamObserver | None) -> None:
        self._observer = observer
        if self._gone and observer is not None:
            observer.client_gone()

    def send_head(self, status: int, headers: list[Header]) -> None:
        self._queue.append({"type": "http.response.start", "status": status, "headers": headers})
        self._kick()

    def send_bytes(self, data: bytes) -> None:
        self._queue.append({"type": "http.response.body", "body": data, "more_body": True})
        self._queued_bytes += len(data)
        if self._queued_bytes > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            if self._observer is not None:
                self._observer.pause()
        self._kick()

    def end(self) -> None:
        """Ends with the last queued piece, which saves a write."""
        self._ended = True
        if self._queue and self._queue[-1]["type"] == "http.response.body":
            self._queue[-1]["more_body"] = False
        else:
            self._queue.append({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        """Nothing more is queued: an endpoint that returns without ending its answer has its connection closed."""
        self._ended = True

    def settle(self, then: Callable[[], None]) -> None:
        self._observer = None
        if self._closed:
            then()
        else:
            self._then = then
            self._kick()

    async def run(self) -> None:
        """Send what is queued, and what comes, until nothing follows and all is out."""
        while self._then is None or (self._queue and not self._gone):
            if self._queue:
                await self._flush()
                continue
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._written is not None:
            await self._written(0.0 if self._gone else self._write_timeout)

    def close(self) -> None:
        """The endpoint is done, whatever happened."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        then, self._then = self._then, None
        if then is not None:
            then()

    def _kick(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _flush(self) -> None:
        queue = self._queue
        while queue and not self._gone:
            try:
                # One deadline for what is queued now; what is added meanwhile gets another.
                async with asyncio.timeout(self._write_timeout):
                    for _ in range(len(queue)):
                        await self._send_one(queue.popleft())
            except OSError:  # a time-out is one, and servers say so that a client is gone
                self._leave()
        if self._gone:
            queue.clear()

    async def _send_one(self, message: Message) -> None:
        await self._send(message)
        self._queued_bytes -= len(message.get("body", b""))
        if self._paused and self._queued_bytes < LOW_WATER_BYTES:
            self._paused = False
            if self._observer is not None:
                self._observer.resume()

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self._ended:
                    self._leave()
                return

    def _leave(self) -> None:
        if self._gone:
            return
        self._gone = True
        if self._observer is not None:
            self._observer.client_gone()
        self._kick()
