"""What listens on the pod's serving port: the engine's own application, behind a gate, and beside it the watch.

The gate lets in whoever shows the worker token, if there is one: nothing behind it hears of others. It counts requests,
holds the engine to its capacity and turns new ones away while the engine drains: it answers ``503`` with
``x-hotspare-reselect``, which tells the gateway that nothing was started. The watch is one NDJSON stream per gateway:
the engine's state at once, on every change, and at least every heartbeat. Its end *is* the news that this engine is
gone. Room is news, too, once the engine was said to be full or has turned somebody away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from workers.asgi import Message, Receive, Scope, Send, respond_error
from workers.contract import (
    CODE_WORKER_TOKEN,
    HEADER_RESELECT,
    INTERNAL_PREFIX,
    WATCH_CONTENT_TYPE,
    WATCH_PATH,
    WatchLine,
    encode_watch_line,
)
from workers.engine import ASGIApp
from workers.worker_token import WorkerTokens

ROOM_SECONDS: Final = 0.02
"""So long the news of room waits for more of it: one line tells of all places that became free meanwhile."""

_RESELECT: Final = ((HEADER_RESELECT, "1"),)


class Change:
    """Wakes everybody who waits for the next change; a waiter that comes later waits for the one after."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, *, timeout_seconds: float) -> None:
        """Until the next change, or the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            return


class ServingApp:
    """The ASGI application of the serving port; exists for one promotion."""

    def __init__(
        self,
        engine_app: ASGIApp,
        *,
        watch_line: Callable[[int], WatchLine],
        change: Change,
        capacity: int,
        heartbeat_seconds: float,
        is_dead: Callable[[], bool],
        on_dead: Callable[[], None],
        tokens: WorkerTokens | None = None,
    ) -> None:
        """``watch_line`` makes a line from its sequence number; ``is_dead`` is the engine's, asked before each message
        that leaves, and ``on_dead`` is called at the first that must not."""
        self._engine_app = engine_app
        self._tokens = tokens
        self._watch_line = watch_line
        self._change = change
        self._capacity = capacity
        self._heartbeat_seconds = heartbeat_seconds
        self._is_dead = is_dead
        self._on_dead = on_dead
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusing: str | None = None
        self._closing = False
        self._refused = 0
        self._watches = 0
        self._known_full = False
        """Somebody has heard that we are full, and not since that we are not."""
        self._room_news: asyncio.TimerHandle | None = None

    @property
    def refused(self) -> int:
        """Requests turned away for want of room."""
        return self._refused

    @property
    def watches(self) -> int:
        """Watch streams that are open."""
        return self._watches

    @property
    def inflight(self) -> int:
        """Requests being answered; watches do not count."""
        return self._inflight

    def refuse(self, reason: str) -> None:
        """From now on turn new requests away; running ones go on."""
        self._refusing = reason

    def close_watches(self) -> None:
        """End the watch streams: nothing more will be said here."""
        self._closing = True
        if self._room_news is not None:
            self._room_news.cancel()
        self._change.notify()

    async def wait_idle(self, *, timeout_seconds: float) -> bool:
        """Whether the running requests ended within the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._tokens is not None and not self._tokens.accepts(scope["headers"]):
            await respond_error(
                send,
                401,
                message="this worker serves its own gateways only: the worker token is missing, or not the right one",
                kind="invalid_request_error",
                code=CODE_WORKER_TOKEN,
                headers=_RESELECT,
            )
        elif scope["type"] != "http":
            await self._engine_app(scope, receive, send)
        elif scope["path"] == WATCH_PATH:
            await self._watch(scope, receive, send)
        elif scope["path"].startswith(INTERNAL_PREFIX):
            await respond_error(
                send,
                404,
                message=f"no such path: {scope['path']}",
                kind="invalid_request_error",
                code="not_found",
            )
        elif self._refusing is not None:
            await respond_error(
                send,
                503,
                message=f"this engine takes no new requests: {self._refusing}",
                kind="service_unavailable",
                code="draining",
                headers=_RESELECT,
            )
        elif self._inflight >= self._capacity:
            self._refused += 1
            self._known_full = True
            await respond_error(
                send,
                503,
                message=f"this engine already answers {self._capacity} requests, its capacity",
                kind="service_unavailable",
                code="overloaded",
                headers=_RESELECT,
            )
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._inflight += 1
        self._idle.clear()
        try:
            await self._engine_app(scope, receive, self._guarded(send))
        finally:
            self._inflight -= 1
            if not self._inflight:
                self._idle.set()
            if self._known_full and self._room_news is None and not self._closing:
                self._room_news = asyncio.get_running_loop().call_later(ROOM_SECONDS, self._tell_of_room)

    def _tell_of_room(self) -> None:
        self._room_news = None
        if self._inflight < self._capacity:  # else the next one that ends says so
            self._known_full = False
            self._change.notify()

    def _guarded(self, send: Send) -> Send:
        """``send``, but for a dead engine: what its application then says (an error as an answer, an orderly end of a
        stream that is not over) is not the request's fate. The process ends now; the gateway sees the break and goes on
        elsewhere."""

        async def guarded(message: Message) -> None:
            if self._is_dead():
                self._on_dead()
                await asyncio.Event().wait()
            await send(message)

        return guarded

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            await respond_error(
                send,
                405,
                message="the watch is read with GET",
                kind="invalid_request_error",
                code="method_not_allowed",
            )
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", WATCH_CONTENT_TYPE.encode()), (b"cache-control", b"no-store")],
            }
        )
        gone = asyncio.ensure_future(_disconnected(receive))
        self._watches += 1
        try:
            seq = 0
            while not gone.done() and not self._closing:
                self._known_full = self._known_full or self._inflight >= self._capacity
                line = encode_watch_line(self._watch_line(seq))
                await send({"type": "http.response.body", "body": line, "more_body": True})
                seq += 1
                await self._change.wait(timeout_seconds=self._heartbeat_seconds)
            if not gone.done():
                await send({"type": "http.response.body", "body": encode_watch_line(self._watch_line(seq))})
        finally:
            self._watches -= 1
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
