"""Follows one source of addresses, and keeps the registry at what it says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from app.discovery.findings import Failed, Finding, Picture
from app.discovery.sources import Source
from app.fleet.registry import WorkerRegistry

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0


class Discovery:
    """Use as ``async with``, inside the registry's. ``on_discovered`` is called once the source has given a list and
    each address on it was tried."""

    def __init__(self, source: Source, registry: WorkerRegistry, *, on_discovered: Callable[[], None]) -> None:
        self.source = source
        self.picture = Picture()
        self._registry = registry
        self._on_discovered = on_discovered
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        return self.picture.answered and self.picture.problem is None

    @property
    def problem(self) -> str | None:
        """Why there is no list, or no fresh one: a sentence."""
        reason = self.picture.problem
        if reason is None:
            return None if self.picture.answered else f"{self.source.name} has not answered yet"
        return f"{self.source.name} {reason}"

    async def __aenter__(self) -> Self:
        self._spawn(asyncio.create_task(self._run()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        while True:
            try:
                return await self.source.run(self._hear)
            except Exception:  # a bug there must not end discovery for good
                logger.exception("discovery by %s failed", self.source.name)
                self._hear(Failed("could not be asked, because of an error in the gateway"))
            await asyncio.sleep(RESTART_SECONDS)

    def _hear(self, finding: Finding) -> None:
        first = not self.picture.answered
        outcome = self.picture.hear(finding, time.time())
        if outcome.changed:
            self._log()
        if outcome.addresses is None:
            return
        number = len(outcome.addresses)
        logger.info("%s names %d worker%s", self.source.name, number, "" if number == 1 else "s")
        self._registry.follow(outcome.addresses)
        if first:
            self._spawn(asyncio.create_task(self._tell()))

    async def _tell(self) -> None:
        await self._registry.tried()
        self._on_discovered()

    def _log(self) -> None:
        if self.picture.problem is None:
            logger.info("%s works again", self.source.name)
        elif self.picture.answered:
            kept = len(self.picture.addresses)
            logger.warning("%s; the %d workers known last stay in use", self.problem, kept)
        else:
            logger.warning("%s; no worker is known yet", self.problem)
