"""Looks after the engine while it is active.

What is found here is of two kinds. An engine that is dead, stuck, or not allowed its memory any more ends now
(EngineDeadError): its requests go on elsewhere, and every moment that it lives on is one that they wait. One that holds
too much, or whose lock elects nobody, serves well enough, and is replaced in order (``replace``).

What makes this loop stand still is the keeper's to find (``workers.heartbeat``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from workers import usage
from workers.engine import Engine, EngineDeadError
from workers.leaks import LeakWatch

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 10.0
"""How long the engine's answer to a look may take: it is asked of what it knows already."""


class EngineMonitor:
    """Asks the engine how it is, at intervals and as soon as a request met a dead one."""

    def __init__(
        self,
        engine: Engine,
        *,
        interval_seconds: float,
        leaks: LeakWatch,
        lock_problem: Callable[[], str | None],
        has_spare: Callable[[], bool],
        replace: Callable[[str], None],
    ) -> None:
        """``replace`` is told why this engine is to leave in order; more than once, if it takes its time."""
        self._engine = engine
        self._interval_seconds = interval_seconds
        self._leaks = leaks
        self._lock_problem = lock_problem
        self._has_spare = has_spare
        self._replace = replace
        self._died = asyncio.Event()

    def engine_died(self) -> None:
        """A request met a dead engine: look now."""
        self._died.set()

    async def watch(self, server: asyncio.Task[None]) -> None:
        """Look after engine and server, for ever.

        Raises:
            EngineDeadError: the engine died; noticed at once if a request met it, otherwise at the next look.
            ServerEnded: nobody listens any more.
        """
        died = asyncio.ensure_future(self._died.wait())
        try:
            while not server.done():
                await self._look()
                await asyncio.wait({died, server}, timeout=self._interval_seconds, return_when=asyncio.FIRST_COMPLETED)
            server.result()
        finally:
            died.cancel()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._engine.check_health()
        except TimeoutError:
            raise EngineDeadError(f"the engine did not say within {HEALTH_SECONDS:g} s how it is") from None
        if self._engine.dead:
            raise EngineDeadError("the engine died")
        excess = self._leaks.observe(usage.read_usage(), spare=self._has_spare(), now=time.monotonic())
        if (problem := self._lock_problem() or excess) is not None:
            self._replace(problem)
