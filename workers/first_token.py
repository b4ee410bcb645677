"""When the first bytes of an answer left after a promotion: the end of a recovery, as far as an engine sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from workers.asgi import Message, Receive, Scope, Send
from workers.engine import ASGIApp

ASKED_WITHIN_SECONDS: Final = 10.0
"""Of the promotion: who comes later did not wait for it."""


class FirstToken:
    """ASGI middleware for one promotion. Once it has seen what it waits for, requests pass it by. What is read with
    GET, as the engine does to see that it answers, is no answer."""

    def __init__(self, app: ASGIApp, *, since: float, told: Callable[[float], None]) -> None:
        """``since``: when the promotion was over, ``time.monotonic()``; ``told`` once, with the seconds since then."""
        self._app = app
        self._since = since
        self._told: Callable[[float], None] | None = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._told is not None and scope["type"] == "http" and scope["method"] == "POST":
            if time.monotonic() - self._since <= ASKED_WITHIN_SECONDS:
                send = self._noting(send)
            else:
                self._told = None
        await self._app(scope, receive, send)

    def _noting(self, send: Send) -> Send:
        good = False

        async def noting(message: Message) -> None:
            nonlocal good
            if message["type"] == "http.response.start":
                good = message["status"] == 200
            elif good and message.get("body") and (told := self._told) is not None:
                self._told = None
                told(time.monotonic() - self._since)
            await send(message)

        return noting
