"""The first process of a container: what the kernel and init do for any other process, and nobody does for this one.

As process 1 of its PID namespace it is not ended by a signal that it does not handle: the kernel drops those. And what
other processes there leave behind when they end (``kubectl exec`` of a shell, say) becomes its child, to be buried.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection
from types import FrameType
from typing import Final

from workers.exit_codes import ExitCode
from workers.shutdown import end_process

logger = logging.getLogger(__name__)

FIRST: Final = 1
STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def end_when_told() -> None:
    """From now on until somebody else handles them, SIGTERM and SIGINT end this process with 0: nothing has begun that
    would have to end in order. Those that ``hotspare`` had the kernel keep for it come at once."""
    for number in STOPS:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _end(number: int, _: FrameType | None) -> None:
    logger.info("%s: it ends while it starts, nothing is lost", signal.Signals(number).name)
    end_process(ExitCode.DRAINED)


def bury_strays(own: Collection[int]) -> None:
    """Reap processes that ended and were left to this one, if it is the first. ``own`` are children of its own, whose
    ends are somebody else's to see; behind one of those that is not reaped yet the rest waits for the next time."""
    if os.getpid() != FIRST:
        return
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)
