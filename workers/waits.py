"""How long an engine has waited for its memory service, told while it does.

A wake has a limit of its own, and what it waits for others is not its fault. So whoever waits says so: in the thread
that does (``waiting``), or, of a further rank, in its process (``tell``, see ``workers.ranks``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waits:
    """One thread waits at a time; any may ask."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: tuple[float, float | None] = (0.0, None)  # what is over, and since when it waits; replaced as one
        self.tell: Callable[[bool], None] | None = None
        """Called when a wait begins (True) and when it is over (False), by whoever waits."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what only the memory service can bring to an end."""
        over, _ = self._spent
        began = self._clock()
        self._spent = (over, began)
        try:
            self._say(True)
            yield
        finally:
            self._spent = (over + self._clock() - began, None)
            self._say(False)

    @property
    def seconds(self) -> float:
        """All waits so far, the one under way included."""
        over, since = self._spent
        return over if since is None else over + self._clock() - since

    def _say(self, waits: bool) -> None:
        if self.tell is not None:
            self.tell(waits)


class Allowance:
    """What something may take: so long by itself, and as long again as it waits, but not for ever."""

    def __init__(
        self, *, seconds: float, wait_seconds: float, waits: Waits | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """It begins now. Beyond ``wait_seconds`` waits count as its own time; without ``waits`` nobody knows them, and
        all of them are allowed for."""
        self.seconds = seconds if waits is not None else seconds + wait_seconds
        self._most = wait_seconds
        self._waits = waits
        self._clock = clock
        self._began = clock()
        self._before = waits.seconds if waits is not None else 0.0

    @property
    def waited(self) -> float:
        """How much of the time so far went into waits that are allowed for."""
        return min(self._waits.seconds - self._before, self._most) if self._waits is not None else 0.0

    @property
    def left(self) -> float:
        """The least time until it is over; 0 or less: it is."""
        return self.seconds - (self._clock() - self._began - self.waited)
