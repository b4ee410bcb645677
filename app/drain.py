"""The way from a request to end until nothing is left: what a drain waits for, says, and cuts at last.

    WAITING    admitted requests run to their end, those too whose body is still being sent
    FLUSHING   all are answered; complete answers are on their way to readers that are slow
    CUTTING    the time is over: what is left gets an error, in the form that its client can still read
    DONE       nothing is in flight

The lifecycle is DRAINING through the first three. Listeners stay open meanwhile, and closing them is the server's part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, Protocol

from app.admission import AdmissionController
from app.each import each
from app.log_fields import fields
from app.openai.errors import GatewayError, drain_overran

logger = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 1.0
"""How often the log says what is left."""
LAST_WORDS_SECONDS: Final = 2.0
"""How long clients have to take the errors that end their requests when the drain's time is over."""
UNWINDING_SECONDS: Final = 2.0
"""How long requests may take to end whose connections were closed under them. They have nothing to wait for."""


class DrainStage(StrEnum):
    NONE = "none"
    WAITING = "waiting"
    FLUSHING = "flushing"
    CUTTING = "cutting"
    DONE = "done"


class DrainProgress:
    """What others may see of the drain: probes, metrics, the status page. Times are ``time.monotonic()``."""

    def __init__(self) -> None:
        self.stage = DrainStage.NONE
        self.deadline = 0.0
        self.cut = 0
        """Requests that were ended because the time was over."""

    def remaining(self, now: float) -> float:
        """Seconds until what is left is cut; 0 without a drain, and once that has come."""
        return max(0.0, self.deadline - now) if self.stage in (DrainStage.WAITING, DrainStage.FLUSHING) else 0.0


class Connection(Protocol):
    """A client's connection."""

    def last_answer(self) -> None:
        """Tell the client that its connection closes after the answer being made, if that can still be told."""
        ...

    async def written(self, patience: float) -> None:
        """Return once all that was sent has left this process, or the client took nothing for so many seconds."""
        ...

    def cut(self) -> bool:
        """Close at once if the client has not yet taken everything; returns whether that was so."""
        ...


class Sessions(Protocol):
    """Realtime sessions. Their responses are requests in flight like others."""

    @property
    def count(self) -> int: ...

    def drain(self) -> None:
        """Tell them; each closes on its own once nothing of it is in flight."""
        ...

    async def wait_closed(self) -> None: ...


class Drain:
    """One drain. ``connections`` gives those that are open; durations in seconds."""

    def __init__(
        self,
        progress: DrainProgress,
        admission: AdmissionController,
        sessions: Sessions,
        *,
        timeout: float,
        write_timeout: float,
        interrupt_all: Callable[[GatewayError], int],
        connections: Callable[[], Iterable[Connection]],
    ) -> None:
        self._progress = progress
        self._admission = admission
        self._sessions = sessions
        self._timeout = timeout
        self._write_timeout = write_timeout
        self._interrupt_all = interrupt_all
        self._connections = connections
        self._reporter: asyncio.TimerHandle | None = None

    async def run(self, reason: str) -> bool:
        """Returns whether all requests ended; ``False`` is a bug of ours."""
        started = time.monotonic()
        progress = self._progress
        progress.stage, progress.deadline = DrainStage.WAITING, started + self._timeout
        logger.info("%s: draining %s, at most %g s", reason, self._left(), self._timeout, extra=self._fields())
        each([self._sessions.drain, *(connection.last_answer for connection in self._connections())])
        self._report_later()
        try:
            async with asyncio.timeout(self._timeout):
                await self._until_idle()
            ended = True
        except TimeoutError:
            ended = await self._cut()
        finally:
            self._end_reports()
        progress.stage = DrainStage.DONE
        took = time.monotonic() - started
        logger.info("drained in %.1f s", took, extra=fields(seconds=round(took, 3), cut=progress.cut))
        return ended

    async def _until_idle(self) -> None:
        """Nothing is in flight, and answers that are complete have left for their readers, slow ones too."""
        await self._until_ended()
        if self._progress.stage is DrainStage.WAITING:
            self._progress.stage = DrainStage.FLUSHING
        await asyncio.gather(*(connection.written(self._write_timeout) for connection in self._connections()))

    async def _cut(self) -> bool:
        self._progress.stage = DrainStage.CUTTING
        cut = self._progress.cut = self._interrupt_all(drain_overran())
        if cut:
            logger.warning("drain time is over: ended %s", _requests(cut), extra=fields(cut=cut))
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._until_idle()
            return True
        except TimeoutError:
            unread = sum(each([connection.cut for connection in self._connections()]))
        logger.warning("closed on clients that did not take their answers: %d", unread, extra=fields(unread=unread))
        try:
            async with asyncio.timeout(UNWINDING_SECONDS):
                await self._until_ended()
        except TimeoutError:
            logger.error("%s did not end", self._left())  # no traceback helps
            return False
        return True

    async def _until_ended(self) -> None:
        await self._admission.wait_idle()
        await self._sessions.wait_closed()

    def _left(self) -> str:
        requests, sessions = _requests(self._admission.inflight), self._sessions.count
        if not sessions:
            return requests
        return f"{requests} and {sessions} realtime session{'' if sessions == 1 else 's'}"

    def _fields(self) -> dict[str, dict[str, object]]:
        return fields(inflight=self._admission.inflight, sessions=self._sessions.count or None)

    def _report_later(self) -> None:
        self._reporter = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._report)

    def _report(self) -> None:
        progress = self._progress
        left = progress.remaining(time.monotonic())
        if progress.stage is DrainStage.WAITING:
            logger.info("draining: %s left, %.1f s to go", self._left(), left, extra=self._fields())
        elif progress.stage is DrainStage.FLUSHING:
            logger.info("draining: complete answers are on their way to slow readers, %.1f s to go", left)
        self._report_later()

    def _end_reports(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None


def _requests(number: int) -> str:
    return f"{number} request" if number == 1 else f"{number} requests"
