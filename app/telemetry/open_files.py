"""Whether this process can open another file. Where it cannot, nobody else says so: the event loop's library closes new
connections unheard, and tells no handler of it; connections to workers fail as if nobody listened there.

So this tries, four times a second, which costs some microseconds.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from typing import Final

from app.telemetry.regularly import Regularly
from app.telemetry.shortage import News, Shortage

logger = logging.getLogger(__name__)

_TOO_FEW: Final = frozenset((errno.EMFILE, errno.ENFILE))


def open_another() -> int:
    """Open a file and close it; returns the error's number if there is no room for it, else 0."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno if error.errno in _TOO_FEW else 0
    return 0


class OpenFiles(Regularly):
    """An async context manager: it looks while inside."""

    def __init__(self, look: Callable[[], int] = open_another) -> None:
        super().__init__()
        self._open_another = look
        self._shortage = Shortage()

    def look(self, late: float) -> None:
        number = self._open_another()
        match self._shortage.looked(number != 0, now=time.monotonic()):
            case News.BEGUN:
                logger.error(
                    "no more files can be opened: new clients are closed unheard and workers cannot be reached; %s",
                    _what_to_do(number),
                )
            case News.OVER:
                logger.info("files can be opened again")
            case None:
                pass


def _what_to_do(number: int) -> str:
    if number == errno.ENFILE:
        return "the machine has reached its limit for all processes: raise fs.file-max, or see who has so many open"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has reached its limit of {limit}: raise it (ulimit -n, LimitNOFILE=) or lower max_connections "
        "(HOTSPARE_MAX_CONNECTIONS)"
    )
