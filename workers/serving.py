"""What listens on the pod's serving port: the engine's own application, behind a gate, and beside it the watch.

The gate lets in whoever shows the worker token, if there is one: nothing behind it hears of others. It counts requests,
holds the engine to its capacity and turns new ones away while the engine drains: it answers ``503`` with
``x-hotspare-reselect``, which tells the gateway that nothing was started. The watch is one NDJSON stream per gateway:
the engine's state at once, on every change, and at least every heartbeat. Its end *is* the news that this engine is
gone. Room is news, too, once the engine was said to be full or has turned somebody away.

Soon after a promotion the streams of the engine before come back. Each gateway sends its own of them before its new
requests, but none knows of the others': so new ones of one can take the places that streams of another had a moment
ago. Such a stream is let in nevertheless, up to twice the capacity in all: it waits in the engine for the next place,
before all new requests of everybody, since none of those gets in while there are more than the capacity. Only soon
after a promotion: later, a stream that comes is another pod's, and is better off where there is room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn

from workers.asgi import Message, Receive, Scope, Send, disconnected, respond_error
from workers.change import Change
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
from workers.in_flight import InFlight
from workers.resume import RESUME_CONTENT_TYPE
from workers.worker_token import WorkerTokens

logger = logging.getLogger(__name__)

ROOM_SECONDS: Final = 0.02
"""So long the news of room waits for more of it: one line tells of all places that became free meanwhile."""

RETURNING_SECONDS: Final = 10.0
"""How long after a promotion streams of the engine before are expected: a few times what their gateways need to hear of
it, and to send them at the pace that they keep to."""

_RESUME: Final = RESUME_CONTENT_TYPE.encode()
_RESELECT: Final = ((HEADER_RESELECT, "1"),)
_ELSEWHERE: Final = (*_RESELECT, ("connection", "close"))
"""Another request of this connection would get no other answer."""


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
        also: Callable[[], int] = lambda: 0,
        ended: Change | None = None,
    ) -> None:
        """``watch_line`` makes a line from its sequence number; ``is_dead`` is the engine's, asked before each message
        that leaves, and ``on_dead`` is called at the first that must not. ``also``: how many requests the engine
        answers besides, from before a hand-over that came to nothing. ``ended`` is told when a request or a watch has
        ended."""
        self._engine_app = engine_app
        self._tokens = tokens
        self._watch_line = watch_line
        self._change = change
        self._capacity = capacity
        self._heartbeat_seconds = heartbeat_seconds
        self._is_dead = is_dead
        self._on_dead = on_dead
        self.requests = InFlight(ended or Change())
        """Those being answered; watches do not count."""
        self._also = also
        self._refusing: str | None = None
        self._held: asyncio.Event | None = None
        self._closing = False
        self._retiring = False
        self._returning_until = time.monotonic() + RETURNING_SECONDS
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
        return len(self.requests)

    @property
    def _taken(self) -> int:
        return len(self.requests) + self._also()

    def refuse(self, reason: str | None) -> None:
        """From now on turn new requests away; running ones go on. None: take them again."""
        self._refusing = reason

    def retire(self) -> None:
        """Another one has taken this one's place: its watches, by which gateways know that their requests live, end
        with the last of these."""
        self._retiring = True
        if not self.requests:
            self.close_watches()

    def close_watches(self) -> None:
        """End the watch streams: nothing more will be said here."""
        self._closing = True
        if self._room_news is not None:
            self._room_news.cancel()
        self._change.notify()

    def hold(self) -> None:
        """Let nothing of an answer leave until ``let_go``: whoever takes it over begins after what has left."""
        self._held = self._held or asyncio.Event()

    def let_go(self) -> None:
        """Answers go on."""
        held, self._held = self._held, None
        if held is not None:
            held.set()

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
                headers=_ELSEWHERE if self._retiring else _RESELECT,
            )
        elif self._taken >= self._capacity and not self._returns(scope):
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

    def _returns(self, scope: Scope) -> bool:
        """Whether this is a stream that had its place here before, as far as can be known; see the module."""
        if time.monotonic() > self._returning_until or self._taken >= 2 * self._capacity:
            return False
        return any(name == b"content-type" and value.startswith(_RESUME) for name, value in scope["headers"])

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests.enter(scope)
        try:
            await self._answered(scope, receive, send)
        finally:
            self.requests.leave(scope)
            if self._retiring and not self.requests:
                self.close_watches()
            if self._known_full and self._room_news is None and not self._closing:
                self._room_news = asyncio.get_running_loop().call_later(ROOM_SECONDS, self._tell_of_room)

    def _tell_of_room(self) -> None:
        self._room_news = None
        if self._taken < self._capacity:  # else the next one that ends says so
            self._known_full = False
            self._change.notify()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's application, but for a dead engine: what it then says (an error as an answer, an orderly end of
        a stream that is not over), and that it says nothing more, is not the request's fate. The process ends now; the
        gateway sees the break and goes on elsewhere."""
        begun = False

        async def guarded(message: Message) -> None:
            nonlocal begun
            if self._is_dead():
                await self._end_dead()
            if self._held is not None:
                await self._held.wait()
            begun = True
            await send(message)

        try:
            await self._engine_app(scope, receive, guarded)
        except Exception:
            if self._is_dead():
                await self._end_dead()
            if begun:
                raise
            logger.exception("the engine's application failed on a request that it had not begun to answer")
            message = "the engine failed on this request without an answer; the worker's log says why"
            await respond_error(guarded, 500, message=message, kind="server_error", code="internal_error")
        if self._is_dead():
            await self._end_dead()

    async def _end_dead(self) -> NoReturn:
        self._on_dead()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

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
        gone = asyncio.ensure_future(disconnected(receive))
        self._watches += 1
        try:
            seq = 0
            while not gone.done() and not self._closing:
                self._known_full = self._known_full or self._taken >= self._capacity
                line = encode_watch_line(self._watch_line(seq))
                await send({"type": "http.response.body", "body": line, "more_body": True})
                seq += 1
                await self._change.wait(timeout_seconds=self._heartbeat_seconds)
            if not gone.done():
                await send({"type": "http.response.body", "body": encode_watch_line(self._watch_line(seq))})
        finally:
            self._watches -= 1
            self.requests.changed.notify()
            gone.cancel()
