"""[P] A request's deadlines: when its client must hear something, and when a worker has been silent for too long.

One timer per request runs for the nearest of them, and what it finds due is judged here. All figures are seconds, and
points in time are those of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from app.relay.kept import KeepLimits

WAITING_KEEPALIVE_SECONDS: Final = 5.0
"""A client whose stream waits for a worker is told more often that it was not forgotten."""

DECIDING_SECONDS: Final = 1.0
"""So long a worker may take to refuse; what it takes longer counts as being queued there, and is no search."""

STALL_LIMITS_WITHOUT_ALTERNATIVE: Final = 3
"""A silent worker is left at the limit only for another one. Alone it gets this many limits: by then (180 s) its keeper
has replaced an engine that is stuck (120 s without a step), and the request ran again there."""

RETURNING_SECONDS: Final = 0.05
"""Within so long after a promotion new requests may come to the worker: those that were interrupted come first, this
gateway's by their place in line, those of other gateways by being quicker than this."""

BREAKS_WITHOUT_RESUME: Final = 3
"""Where no answer is resumed: how often a request of which nothing was delivered is started in all."""

LONGEST_TIMER_SECONDS: Final = 3600.0
_SHORTEST_TIMER_SECONDS: Final = 0.001
_OVERDUE_SECONDS: Final = 0.05
"""When to look again at what is due already and could not be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Durations in seconds; ``first_byte`` and ``stall`` may be infinite."""

    wait_for_worker: float
    resume_wait: float
    """The same for an answer that another worker had begun."""
    home: float = 0.0
    """Of that, so long it waits for the spare of its own worker; 0: not at all."""
    first_byte: float
    stall: float
    keepalive: float
    breaks: int
    """So many in a row, without having gained anything, end a request; those whose engine died do not count if answers
    are resumed."""
    resumes: bool
    keep: KeepLimits
    max_held_bytes: int
    first_look: float = field(init=False)
    """When a new request's deadlines are looked at first."""
    first_look_streaming: float = field(init=False)

    def __post_init__(self) -> None:
        whole = min(self.first_byte, self.stall, LONGEST_TIMER_SECONDS)
        object.__setattr__(self, "first_look", max(_SHORTEST_TIMER_SECONDS, whole))
        streaming = min(whole, max(self.keepalive, _OVERDUE_SECONDS))
        object.__setattr__(self, "first_look_streaming", max(_SHORTEST_TIMER_SECONDS, streaming))

    def silence(self, *, responded: bool) -> float:
        """How long a worker may be silent."""
        return self.stall if responded else self.first_byte


def keep_alive_due(
    limits: RelayLimits,
    *,
    sent_at: float,
    head_sent: bool,
    attempt_since: float | None,
    search_since: float,
    search_until: float,
    now: float,
) -> float:
    """When to send a stream's next keep-alive. ``attempt_since``: since when a worker has the request, if one has;
    ``search_since`` is 0 while none is looked for.

    A first keep-alive takes the answer's real status away. So the search for a worker is decided first, if it ends
    about when the keep-alive is due. A worker that has the request may refuse it too; one that has not within a moment
    is taken to be at work.
    """
    interval = limits.keepalive
    if head_sent and attempt_since is None:
        interval = min(interval, WAITING_KEEPALIVE_SECONDS)
    due = sent_at + interval
    if head_sent or not search_since or search_until > due + DECIDING_SECONDS:
        return due
    return max(due, (now if attempt_since is None else attempt_since) + DECIDING_SECONDS)


def next_look(limits: RelayLimits, now: float, *, keep_alive: float | None, silent: float | None) -> float:
    """In how many seconds to look again; the two points in time where there are such."""
    due = now + min(limits.first_byte, limits.stall, LONGEST_TIMER_SECONDS)
    if keep_alive is not None:
        due = min(due, max(keep_alive, now + _OVERDUE_SECONDS))
    if silent is not None:
        due = min(due, max(silent, now + _OVERDUE_SECONDS))
    return max(_SHORTEST_TIMER_SECONDS, due - now)


def lost_patience(limit: float, overdue: float, *, elsewhere: bool) -> bool:
    """Whether to leave a worker that has been silent for so much longer than its limit; ``elsewhere``: another one
    could take the request."""
    return elsewhere or overdue >= (STALL_LIMITS_WITHOUT_ALTERNATIVE - 1) * limit
