"""Says in the log that requests find no worker, and that ``/health`` has turned for want of one: the states of single
workers are lines at level info, since one death is routine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from app.fleet import outages
from app.fleet.outages import Outages, nobody_for_too_long
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle, LifecycleMachine
from app.telemetry.regularly import Regularly

logger = logging.getLogger(__name__)

_NAMED: Final = 5


class OutageLog(Regularly):
    """An async context manager: it looks while inside."""

    def __init__(
        self,
        registry: WorkerRegistry,
        lifecycle: LifecycleMachine,
        *,
        wait_seconds: float,
        resume_wait_seconds: float | None = None,
        health_needs_worker: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait_seconds``: how long a request waits for a worker; ``resume_wait_seconds``: how long an answer
        that had begun does, if answers are resumed."""
        super().__init__()
        self._registry = registry
        self._lifecycle = lifecycle
        self._waits = f"up to {wait_seconds:g} s (wait_for_worker_seconds)"
        if resume_wait_seconds is not None:
            self._waits += f", answers that had begun up to {resume_wait_seconds:g} s (resume_wait_seconds),"
        self._health_needs_worker = health_needs_worker
        self._clock = clock
        self._outages = Outages()
        self._unhealthy = False

    def look(self, late: float = 0.0) -> None:
        now = self._clock()
        news = self._outages.looked(self._registry.served_models(), now=now)
        if news.gone:
            logger.warning(
                "no worker takes requests for %s any more: they wait %s and then end with no_worker; /status says what "
                "is known of each worker",
                _named(news.gone),
                self._waits,
            )
        if news.back:
            logger.info("workers take requests for %s again, after %.1f s", _named(news.back), news.seconds)
        if self._health_needs_worker and self._lifecycle.state is Lifecycle.READY:
            self._look_at_health(now)

    def _look_at_health(self, now: float) -> None:
        unhealthy = nobody_for_too_long(self._registry.nobody_since, now=now)
        if unhealthy == self._unhealthy:
            return
        self._unhealthy = unhealthy
        if unhealthy:
            logger.warning(
                "/health says 503 no_worker from now on: no worker was routable for %g s, and health_needs_worker "
                "(HOTSPARE_HEALTH_NEEDS_WORKER) is set",
                outages.NOBODY_SECONDS,
            )
        else:
            logger.info("/health says 200 again: a worker is routable")


def _named(models: Sequence[str]) -> str:
    """Names that workers gave, in a form that cannot end the line; few of them."""
    shown = ", ".join(repr(model) for model in models[:_NAMED])
    return shown if len(models) <= _NAMED else f"{shown} and {len(models) - _NAMED} more models"
