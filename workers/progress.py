"""[P] Whether requests get on, told apart from whether steps are made.

An engine can make steps for ever and get nobody on: the same request is put off and computed again, over and over. So
each request has a mark, the tokens of it that have been computed, prompt and answer, and only a mark beyond its own
highest counts, or an end that the engine made. A long prefill gets on with each of its chunks. A client that gives up
is no progress: where nobody gets on they do so all the time. The mark that its request had at its end is, though: it
may have got on since the last look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LATE_SECONDS: Final = 10.0
"""So much later than it was due a look may be for a reason of the engine's. More was this process's own sleep (a
suspended machine), and no request's fault."""


class TokenProgress:
    """Watches the requests of one engine. Times are seconds of one monotonic clock."""

    def __init__(self, *, timeout_seconds: float, interval_seconds: float) -> None:
        """``interval_seconds``: how often somebody looks."""
        self._timeout_seconds = timeout_seconds
        self._longest_look_seconds = interval_seconds + LATE_SECONDS
        self._furthest: dict[str, int] = {}
        self._since = self._looked_at = 0.0

    def observe(self, marks: Mapping[str, int], *, aborted: Mapping[str, int], now: float) -> str | None:
        """``marks`` of all requests that run or wait, read before ``aborted``: the last ones of those that others than
        the engine have ended since the last look. Why the engine must be taken for stuck, a sentence, or None."""
        before, unseen = self._furthest, now - self._looked_at - self._longest_look_seconds
        self._looked_at = now
        self._furthest = {name: max(mark, before.get(name, 0)) for name, mark in marks.items()}
        if unseen > 0:
            self._since += unseen
        # Neither here nor aborted: the engine has answered it.
        if not before or any(marks.get(name, aborted.get(name, mark + 1)) > mark for name, mark in before.items()):
            self._since = now
            return None
        if now - self._since <= self._timeout_seconds:
            return None
        return f"none of its {len(marks)} requests has got a token further for {now - self._since:.0f} s"
