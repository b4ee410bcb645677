"""Bodies that are still being sent: each has a deadline, and the end of a drain comes for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.openai.errors import GatewayError, body_too_slow


class Uploads:
    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._over: GatewayError | None = None

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Reading a body happens inside.

        Raises:
            GatewayError: it took too long, or the drain's time is over.
        """
        try:
            async with asyncio.timeout(0 if self._over is not None else seconds) as deadline:
                self._running.add(deadline)
                try:
                    yield
                finally:
                    self._running.discard(deadline)
        except TimeoutError:
            raise self._over or body_too_slow(seconds) from None

    def interrupt_all(self, error: GatewayError) -> int:
        """End every upload with this error, those too that have yet to begin; returns how many were running."""
        self._over = error
        for deadline in self._running:
            deadline.reschedule(0)
        return len(self._running)
