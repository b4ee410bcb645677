"""How late the event loop is: a timer that looks at the clock four times a second.

Every stream of this process waits as long as that timer did, so this is the first thing to look at when a gateway has
too much to do, or when something blocks its loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

PERIOD_SECONDS = 0.25


class LoopLag:
    """An async context manager; ``observe`` gets seconds, never negative."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._due = time.monotonic() + PERIOD_SECONDS
        self._timer = asyncio.get_running_loop().call_later(PERIOD_SECONDS, self._beat)

    def _beat(self) -> None:
        self._observe(max(0.0, time.monotonic() - self._due))
        self._arm()
