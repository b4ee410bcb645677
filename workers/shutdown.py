"""How an engine's process is told to go, and how it ends.

Signals only say that it is time: what is under way is cancelled by whoever runs it through ``Leave.unless_told``, and
``workers.life`` sees to the order of the rest. ``end_process`` is the one place where the process ends without that
order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from workers.engine import EngineDeadError
from workers.exit_codes import ExitCode

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Leaving(Exception):
    """Told to stop."""


class Leave:
    """Whether this engine has been told to leave, which cannot be taken back."""

    def __init__(self, *, engine_id: str) -> None:
        self._engine_id = engine_id
        self._told = asyncio.Event()
        self._signals = 0
        self.told_at = 0.0
        """``time.monotonic()``, once it is told."""

    @property
    def told(self) -> bool:
        return self._told.is_set()

    @contextmanager
    def on_signals(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """While inside, any of these signals asks to leave; a second one ends the process now."""
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self._asked)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, unless told to leave first: then it is cancelled.

        Raises:
            Leaving: told to leave.
            EngineDeadError: found by ``work``, too, when it was cancelled: there is nothing left to be ended in order.
        """
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})
                if not doing.cancelled() and isinstance(failure := doing.exception(), EngineDeadError):
                    raise failure
                raise Leaving
            return doing.result()
        finally:
            doing.cancel()
            leaving.cancel()
            await asyncio.wait({doing, leaving})

    def replace(self, reason: str) -> None:
        """From within: this engine is to leave in order, so that another one takes its place. Again is nothing more."""
        if not self.told:
            logger.error("engine %s leaves, to be replaced: %s", self._engine_id, reason)
            self._tell()

    def _asked(self) -> None:
        self._signals += 1
        if self._signals > 1:
            logger.error("a second signal: engine %s ends now", self._engine_id)
            end_process(ExitCode.FORCED)
        self._tell()

    def _tell(self) -> None:
        self.told_at = self.told_at or time.monotonic()  # a signal does not begin anew what has begun from within
        self._told.set()


def end_process(code: ExitCode) -> NoReturn:
    """End here and now. The one place that does: for an engine that is dead, and for somebody who asked twice."""
    logging.shutdown()
    os._exit(code)
