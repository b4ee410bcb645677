"""Before a hand-over: the requests that no other engine could go on with come to their end first.

The engine serves on meanwhile, new requests too. How long it waits, and what becomes of those that are left then, is
the budget's (``workers.handover``): a person who asked for the hand-over gets it called off, or cuts them; an engine
that was told to stop has to, also if it was told while it waited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from workers.change import Change
from workers.handover import Budget
from workers.in_flight import Request, named

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between two looks at whether there still is a spare."""
PROGRESS_SECONDS: Final = 10.0
"""Between two lines of the log."""


async def settle(
    bound: Callable[[], list[Request]],
    *,
    budget: Callable[[], Budget],
    ended: Change,
    has_spare: Callable[[], bool],
    tell: Callable[[Sequence[Request], float], None],
) -> str:
    """Wait until nothing is ``bound`` to this engine, or nobody is there to hand over to; why the hand-over is called
    off, or "". ``budget`` is asked at each look, and ``tell`` is told: what is left, and for how many seconds it is
    waited for."""
    said_at = 0.0
    said_of: Budget | None = None
    while (left := bound()) and has_spare():
        now, allowed = time.monotonic(), budget()
        if allowed.off:
            return allowed.off
        seconds = allowed.settle_until - now
        if seconds <= 0:
            return "" if allowed.cut else f"{_counted(left)} did not end in time: {named(left)}"
        if allowed != said_of or now - said_at >= PROGRESS_SECONDS:
            said_at, said_of = now, allowed
            logger.info(
                "the hand-over waits %.0f s more for %s, and then %s: %s",
                seconds,
                _counted(left),
                "cuts them" if allowed.cut else "is called off",
                named(left),
            )
        tell(left, seconds)
        await ended.wait(timeout_seconds=min(seconds, LOOK_SECONDS))
    return ""


def say_cut(left: Sequence[Request]) -> None:
    """Name those that end with the hand-over, if there are any."""
    if left:
        are = "is" if len(left) == 1 else "are"
        logger.warning("%s did not end in time and %s cut by the hand-over: %s", _counted(left), are, named(left))


def _counted(left: Sequence[Request]) -> str:
    requests = "1 request" if len(left) == 1 else f"{len(left)} requests"
    return f"{requests} that no other engine could resume"
