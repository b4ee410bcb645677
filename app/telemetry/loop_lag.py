"""How late the event loop is: a timer that looks at the clock four times a second.

Every stream of this process waits as long as that timer did, so this is the first thing to look at when a gateway has
too much to do, or when something blocks its loop.
"""

from __future__ import annotations

from collections.abc import Callable

from app.telemetry.regularly import Regularly


class LoopLag(Regularly):
    """An async context manager; ``observe`` gets seconds, never negative."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        super().__init__()
        self._observe = observe

    def look(self, late: float) -> None:
        self._observe(late)
