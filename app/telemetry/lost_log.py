"""Says in the log that a request was lost, or convicted of killing workers: neither is routine, and where access lines
are off nothing else names the request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from app.fleet.bucket import TokenBucket
from app.relay.relayed import Report

logger = logging.getLogger(__name__)

LINES_PER_SECOND: Final = 5.0
"""And as many at once; the next line says how many requests have none of their own."""


class LostLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = TokenBucket(LINES_PER_SECOND)
        self._untold = 0

    def lost(self, path: str, request_id: bytes, report: Report) -> None:
        """``report``: of a request that has :attr:`Report.lost`."""
        now = self._clock()
        if not self._lines.open(now):
            self._untold += 1
            return
        self._lines.take(now)
        untold, self._untold = self._untold, 0
        poison = report.lost == "poison"
        what = "kills workers, and is refused from now on" if poison else "was lost when a worker broke under it"
        logger.warning(
            "a request %s: %s error=%s lost=%s attempts=%d request_id=%s%s",
            what,
            path,
            "" if report.error is None else report.error.code,
            report.lost,
            report.attempts,
            request_id.decode("latin-1"),
            f"; {untold} more since the last such line" if untold else "",
        )
