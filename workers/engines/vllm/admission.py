"""vLLM's own limits (``--max-num-queued-reqs``, ``--max-num-queued-tokens``), in words that a gateway knows.

Above one of them vLLM answers 503, and nothing was started. A bare 503 is an answer that a gateway gives to its client;
``x-hotspare-reselect`` makes it what it is: another worker is to be asked, and that costs nothing. Other errors of vLLM
have that status, too, so the refusal itself is noted where it is raised, for the request at hand.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from workers.asgi import Message, Receive, Scope, Send
from workers.contract import HEADER_RESELECT
from workers.engine import ASGIApp

_RESELECT: Final = (HEADER_RESELECT.encode(), b"1")
_refusals: Final[ContextVar[list[str] | None]] = ContextVar("hotspare_refusals", default=None)
"""Why the request at hand was not admitted; a list, since vLLM may be asked in a task of its own."""


def refused(reason: str) -> None:
    """The request at hand is not admitted."""
    refusals = _refusals.get()
    if refusals is not None:
        refusals.append(reason)


def limits(scheduler_config: Any) -> bool:
    """Whether there are any."""
    return scheduler_config.max_num_queued_reqs is not None or scheduler_config.max_num_queued_tokens is not None


class AdmissionApp:
    """vLLM's application where it has such limits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusals: list[str] = []

        async def telling(message: Message) -> None:
            if refusals and message["type"] == "http.response.start" and message["status"] == 503:
                message = {**message, "headers": [*message["headers"], _RESELECT]}
            await send(message)

        token = _refusals.set(refusals)
        try:
            await self._app(scope, receive, telling)
        finally:
            _refusals.reset(token)
