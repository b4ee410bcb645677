"""[P] How many more requests one replica may be sent, as far as one gateway can know. Time is passed in, in seconds.

The engine enforces its capacity; several gateways share it. A gateway knows what it sends itself, what the watch said
last of all requests there, and when it was refused. From that it concludes how many places others hold. Too few is
cheap, a request is refused and goes elsewhere; too many would leave a place empty. So doubts count as room, but after a
refusal there is none until an own request ends, a watch line says so, or a pause is over: then *one* request asks.

Whoever holds a place can always be quicker to use it again than a gateway that must hear of it first. So the watch
tells how many were refused: for each refusal of another gateway, one that holds more than its share leaves the next
place that it frees to others, for as long as they need to hear of it.
"""

from __future__ import annotations

import sys
from typing import Final

PAUSE_SECONDS: Final = 0.05
PAUSE_LIMIT_SECONDS: Final = 0.25
LAG_SECONDS: Final = 0.02
"""So long a watch line may have been on its way, and in a busy loop's queue."""
LEFT_SECONDS: Final = 0.05
"""How long a place is left to other gateways: a few times what a worker takes to tell them of it."""


class Room:
    """One replica's, from its watch and from what became of requests. ``own`` are ours that it has, or is getting."""

    __slots__ = (
        "_asking",
        "_asks_at",
        "_capacity",
        "_gateways",
        "_high",
        "_high_at",
        "_left",
        "_left_until",
        "_others",
        "_owed",
        "_own_refused",
        "_pause",
        "_refused",
        "own",
    )

    def __init__(self) -> None:
        self.own = 0
        self._capacity = sys.maxsize
        self._others = 0
        self._high = 0
        """Most of ours that a line which comes now may count: more than ``own`` if some ended just before."""
        self._high_at = 0.0
        self._pause = PAUSE_SECONDS
        self._asks_at = 0.0
        """When one request may ask though there is no room; 0: not at all."""
        self._asking = False
        self._gateways = 1
        self._refused = -1
        self._own_refused = 0
        self._owed = 0
        """Places that others were refused and that we have not yet left to them."""
        self._left = 0
        """Places that are free and left to others now, until then."""
        self._left_until = 0.0

    @property
    def full(self) -> bool:
        """Whether nothing is free, as far as we know."""
        return self.own + self._others >= self._capacity

    def open(self, now: float) -> bool:
        """Whether one more request may go there."""
        free = self._capacity - self.own - self._others
        if free > 0:
            return now >= self._left_until or free > self._left
        return 0.0 < self._asks_at <= now

    def open_to_returning(self, now: float) -> bool:
        """The same for a request whose worker broke: what is left to others is left to such."""
        return self._capacity > self.own + self._others or 0.0 < self._asks_at <= now

    def leave_until(self, until: float) -> None:
        """All places are left to requests that were interrupted elsewhere, ours and others', until then."""
        self._left = sys.maxsize
        self._left_until = until

    def opens_at(self, now: float) -> float | None:
        """When the mere passing of time opens it, if it does."""
        due = self._left_until if not self.full else self._asks_at
        return due if due > now else None

    # Our requests

    def take(self, now: float) -> None:
        """A request is on its way there."""
        if self.full:
            self._asking = True
            self._asks_at = now + self._pause  # for all of us
        self.own += 1

    def free(self, now: float) -> None:
        """A request is there no more."""
        self._high = self.own if now - self._high_at > LAG_SECONDS else max(self._high, self.own)
        self._high_at = now
        self.own -= 1
        if self._owed and (self.own + 1) * self._gateways > self._capacity:
            self._owed -= 1
            self._left = 1 if now >= self._left_until else self._left + 1
            self._left_until = now + LEFT_SECONDS

    def refused(self, now: float) -> None:
        """A request was turned away: there is no room. The first refusal begins a pause, others change nothing."""
        self.own -= 1
        self._own_refused += 1
        self._others = max(self._others, self._capacity - self.own)
        if self._asking or now >= self._asks_at:
            self._asking = False
            self._asks_at = now + self._pause
            self._pause = min(self._pause * 1.5, PAUSE_LIMIT_SECONDS)

    def answered(self) -> None:
        """It took a request to its end: the next pause is short again."""
        self._pause = PAUSE_SECONDS

    # The watch

    def heard(self, *, inflight: int, capacity: int, refused: int, gateways: int, now: float) -> None:
        """A watch line came. ``refused``: requests turned away so far for want of room; ``gateways``: watches."""
        self._capacity = capacity if capacity > 0 else sys.maxsize
        ours = max(self.own, self._high) if now - self._high_at <= LAG_SECONDS else self.own
        before, self._others = self._others, max(0, inflight - ours)
        self._left = max(0, self._left - max(0, self._others - before))
        self._high_at = 0.0
        self._gateways = max(1, gateways)
        if self._refused >= 0:
            theirs = refused - self._refused - self._own_refused
            self._owed = min(self._owed + max(0, theirs), self._capacity)
        self._refused, self._own_refused = refused, 0
        if not self.full or self._gateways == 1 or (self.own + 1) * self._gateways > self._capacity:
            self._asks_at = 0.0  # the watch tells when there is room
        elif not self._asks_at:
            self._asks_at = now + PAUSE_LIMIT_SECONDS  # those who hold our share learn of it by refusals
