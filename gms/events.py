"""What happened, for people and for tests: one log line and one event each, the newest kept for those who ask."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Final

from gms.protocol import MAX_EVENTS, Event

log: Final = logging.getLogger("gms")

KEPT: Final = 1024


class EventLog:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._last = 0
        self._news = asyncio.Event()

    @property
    def last(self) -> int:
        """The number of the newest event, 0 before the first."""
        return self._last

    def emit(self, kind: str, detail: str, *, pool: str = "", client: str = "", level: int = logging.INFO) -> None:
        """`detail` is a sentence that names pool and client where it matters: it is the log line."""
        self._last += 1
        event = Event(seq=self._last, unix_seconds=time.time(), kind=kind, pool=pool, client=client, detail=detail)
        self._events.append(event)
        log.log(level, "%s", detail)
        self._news.set()
        self._news = asyncio.Event()

    async def after(self, number: int, timeout_seconds: float) -> list[Event]:
        """Events after `number`, the oldest MAX_EVENTS of them; waits for the first. Empty if none comes in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._last <= number:
                    await self._news.wait()
        except TimeoutError:
            return []
        return [event for event in self._events if event.seq > number][:MAX_EVENTS]
