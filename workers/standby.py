"""A parked engine tests itself while it waits for the lock.

Each test is the engine's own (``Engine.self_test``: a forward over scratch memory, its mappings, its weights) and what
holds for every process: the lock is still the one that elects, memory and descriptors do not grow. The grant of the
lock ends a test that runs: it is cancelled, and over within a step of the engine. What fails ends the process, so that
the keeper forks the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from workers import metrics
from workers.engine import Engine, EngineDeadError, MemoryLostError
from workers.self_test import SelfTests

logger = logging.getLogger(__name__)

QUIT_SECONDS: Final = 2.0
"""How long a test that is cancelled may take to be over. One that takes longer hangs, and so would the promotion."""

Check = Callable[[], str | None]
"""Quick, and never blocks; what is wrong, or None."""


class StandbyWatch:
    """Tests one engine whenever it is parked."""

    def __init__(
        self,
        *,
        engine: Engine,
        record: SelfTests,
        checks: Sequence[Check],
        interval_seconds: float,
        timeout_seconds: float,
    ) -> None:
        """``interval_seconds`` 0: no test is ever made."""
        self._engine = engine
        self._record = record
        self._checks = checks
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds

    async def test(self) -> None:
        """One test.

        Raises:
            EngineDeadError: it was not passed; the record says so too.
        """
        if not self._interval_seconds:
            return
        started = time.monotonic()
        try:
            await self._test()
        except EngineDeadError as error:
            self._record.failed(str(error))
            metrics.record_self_test(None)
            raise
        now = time.monotonic()
        self._record.passed(now=now, took=now - started)
        metrics.record_self_test(now - started)

    async def while_waiting(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Until ``waiting`` (for the lock) is over, with tests meanwhile; none runs any more afterwards.

        Raises:
            EngineDeadError: a test was not passed, or does not end. ``waiting`` is cancelled then.
            Exception: what ``waiting`` raises.
        """
        wait = asyncio.ensure_future(waiting)
        tests = asyncio.ensure_future(self._at_intervals())
        try:
            await asyncio.wait({wait, tests}, return_when=asyncio.FIRST_COMPLETED)
            if not wait.done():
                tests.result()  # it never returns: this raises
            tests.cancel()
            await asyncio.wait({tests})  # which takes QUIT_SECONDS at most
            wait.result()
            if not tests.cancelled() and (failure := tests.exception()) is not None:
                raise failure
        finally:
            tests.cancel()
            wait.cancel()
            await asyncio.wait({tests})
            await asyncio.wait({wait}, timeout=QUIT_SECONDS)
            if not tests.cancelled() and isinstance(failure := tests.exception(), EngineDeadError):
                raise failure  # not only who waits, but who gives up waiting must know that it hangs

    async def _at_intervals(self) -> None:
        if not self._interval_seconds:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._interval_seconds)
            await self.test()

    async def _test(self) -> None:
        for check in self._checks:
            if (problem := check()) is not None:
                raise EngineDeadError(f"the self-test of a parked engine failed: {problem}")
        # Not asyncio.timeout, which would wait for a test that cannot be cancelled either.
        testing = asyncio.ensure_future(self._engine.self_test())
        try:
            await asyncio.wait({testing}, timeout=self._timeout_seconds)
            if not testing.done():
                raise EngineDeadError(
                    f"the self-test of a parked engine was not over in {self._timeout_seconds:g} s: it hangs"
                )
        except asyncio.CancelledError:
            testing.cancel()
            _, hanging = await asyncio.wait({testing}, timeout=QUIT_SECONDS)
            if hanging:
                problem = f"the self-test that was interrupted was not over in {QUIT_SECONDS:g} s: it hangs"
                raise EngineDeadError(problem) from None
            raise
        testing.cancel()
        try:
            testing.result()
        except MemoryLostError:
            raise
        except EngineDeadError as error:
            raise EngineDeadError(f"the self-test of a parked engine failed: {error}") from error
        except Exception as error:
            logger.exception("the self-test ended on an unexpected error")
            raise EngineDeadError(f"the self-test of a parked engine failed: {error!r}") from error
