"""SIGTERM and SIGINT, from a process's first line to its last.

While it starts the kernel keeps them for it (they are *held*: blocked), so that no signal is lost and none interrupts
an import in the middle; the steps of the start ask in between, and leave. Whoever serves hears them. Being held
survives ``exec``: a process that is started like this has no moment at all at which a signal would end it improperly,
not even while its interpreter starts. Nor does the kernel drop what process 1 of a container holds, as it does with
what such a process neither holds nor hears.

Nothing heavy may be imported here.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Final

from app.exit_codes import DRAINED

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def hold() -> None:
    """From now on; threads that begin later hold them for good."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """For as long: by what is started meanwhile until it hears them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """For as long; handlers are there already. What was held comes at once."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_if_stopped() -> None:
    """Between two steps of a start.

    Raises:
        SystemExit: a signal is held. There is nothing to drain.
    """
    if not signal.sigpending().isdisjoint(STOPS):
        raise SystemExit(DRAINED)
