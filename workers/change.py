"""Something that many wait for, again and again."""

from __future__ import annotations

import asyncio


class Change:
    """Wakes everybody who waits for the next change; a waiter that comes later waits for the one after."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, *, timeout_seconds: float | None) -> None:
        """Until the next change, or the timeout; None: as long as it takes."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            return
