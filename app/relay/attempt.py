"""One attempt of a request on one worker: reads the worker's answer and decides what of it may leave.

A complete (JSON) answer is held until it is whole; of an event stream, whole events leave. So whatever breaks before
the first event, or anywhere in a held answer, breaks unseen, and the request can run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from app.fleet.registry import Replica
from app.openai.errors import Header
from app.openai.sse import EventSplitter, EventTooLarge, NotEvents, without_leading_comments
from app.openai.surface import RelayRoute
from app.openai.units import BadNote, UnitSplitter
from app.relay.headers import find
from app.relay.upstream import Break, UpstreamConnection, UpstreamError
from workers.contract import HEADER_RESELECT, HEADER_STREAM

_RESELECT = HEADER_RESELECT.encode()
_STREAM = HEADER_STREAM.encode()
_EVENT_STREAM = b"text/event-stream"

MAX_COMMENT_BYTES = 1024 * 1024
"""Of comments before the first event: a sign of life every second for hours, and no more."""


class Verdict(Enum):
    FINISHED = "finished"
    """The answer is delivered, to its end."""
    RESELECT = "reselect"
    """The worker started nothing and says: take another one."""
    UNTRUSTED = "untrusted"
    """The worker does not take this gateway for one of its own: the worker token is another. Nothing was started."""
    UNSENT = "unsent"
    """The connection was gone before the request was written: as good as refused."""
    STALE = "stale"
    """An idle connection was just being closed; nothing was started."""
    BROKEN = "broken"


_REFUSALS = {401: Verdict.UNTRUSTED, 503: Verdict.RESELECT}


class Answer(Protocol):
    """What an attempt hands over: the relay's side."""

    @property
    def delivered(self) -> bool:
        """Whether a client has seen any of the answer, so that it cannot start again."""
        ...

    def events(self, status: int, headers: list[Header], events: bytes) -> None: ...

    def whole(self, status: int, headers: list[Header], body: bytes) -> None: ...

    def part(self, status: int, headers: list[Header], data: bytes, done: bool) -> None:
        """A piece of a complete answer that is too large to be held."""
        ...


class Attempt:
    """An ``UpstreamSink``. Says its verdict once, at the latest when nothing more can come; ``reason`` says why it is
    BROKEN."""

    __slots__ = (
        "_answer",
        "_comment_bytes",
        "_connection",
        "_ended",
        "_headers",
        "_held",
        "_held_bytes",
        "_max_held",
        "_on_verdict",
        "_parting",
        "_route",
        "_splitter",
        "_status",
        "progress_at",
        "reason",
        "replica",
        "responded",
    )

    def __init__(
        self,
        replica: Replica,
        connection: UpstreamConnection,
        route: RelayRoute,
        answer: Answer,
        *,
        max_held: int,
        on_verdict: Callable[[Verdict], None],
    ) -> None:
        self.replica = replica
        self.reason = ""
        self.responded = False
        self.progress_at = time.monotonic()
        self._on_verdict: Callable[[Verdict], None] | None = on_verdict
        self._connection: UpstreamConnection | None = connection
        self._route = route
        self._answer = answer
        self._max_held = max_held
        self._status = 0
        self._headers: list[Header] = []
        self._splitter: EventSplitter | UnitSplitter | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._comment_bytes = 0
        self._parting = False
        self._ended = False

    def start(self, request: bytes, *, paused: bool) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(request, self)
        except UpstreamError as error:
            self._connection = None
            self._conclude(Verdict.UNSENT, error.kind.value)
            return
        if paused:
            self.pause()

    def drop(self) -> None:
        """Stop at once, without a verdict: the worker's connection is aborted if the answer is not complete.
        Idempotent."""
        self._on_verdict = None
        self._abort()

    def _abort(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def give_up(self, reason: str) -> None:
        """End, because the relay says so: as broken, unless the answer's end was there already."""
        self._abort()
        self._conclude(Verdict.FINISHED if self._ended else Verdict.BROKEN, reason)

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # UpstreamSink

    def head(self, status: int, headers: list[Header]) -> None:
        self.progress_at = time.monotonic()
        self._status, self._headers = status, headers
        if status == 200 and self._route.streams and (find(headers, b"content-type") or b"").startswith(_EVENT_STREAM):
            self._splitter = EventSplitter() if find(headers, _STREAM) is None else UnitSplitter()

    def read(self, data: bytes, done: bool) -> None:
        # A worker's comments alone are no progress: they would hide a stall for ever. Its steps are its sign of life.
        if self._splitter is None or data[:1] != b":" or b"\ndata:" in data:
            self.progress_at = time.monotonic()
            self.responded = True
        if done:
            self._connection = None  # it is back in the pool, and no longer ours
        if self._splitter is not None:
            self._read_events(self._splitter, data, done)
        else:
            self._read_body(data, done)

    def lost(self, error: UpstreamError) -> None:
        self._connection = None
        if self._ended:
            self._conclude(Verdict.FINISHED)
        elif (refusal := self._refusal()) is not None:
            self._conclude(refusal)
        else:
            self._conclude(Verdict.STALE if error.kind is Break.STALE else Verdict.BROKEN, error.kind.value)

    def _read_events(self, splitter: EventSplitter | UnitSplitter, data: bytes, done: bool) -> None:
        try:
            events = splitter.feed(data)
        except (EventTooLarge, NotEvents, BadNote) as error:
            self.give_up(str(error))
            return
        if events and not self._answer.delivered:
            # A comment says nothing yet: it must not cost the request its second chance.
            said = without_leading_comments(events)
            self._comment_bytes += len(events) - len(said)
            if self._comment_bytes > MAX_COMMENT_BYTES:
                self.give_up("it sends comments and no event")
                return
            events = said
        if events:
            self._answer.events(self._status, self._headers, events)
            if not self._ended and self._route.ends_in(events):
                self._ended = True
        if done:
            if self._ended:
                self._conclude(Verdict.FINISHED)
            else:
                where = "within an event" if splitter.incomplete else "early"
                self._conclude(Verdict.BROKEN, f"its stream ended {where}")

    def _read_body(self, data: bytes, done: bool) -> None:
        if self._parting:
            self._answer.part(self._status, self._headers, data, done)
        else:
            self._held.append(data)
            self._held_bytes += len(data)
            if done:
                self._end_body(b"".join(self._held))
                return
            if self._held_bytes > self._max_held:
                self._parting = True
                self._answer.part(self._status, self._headers, b"".join(self._held), False)
                self._held.clear()
        if done:
            self._conclude(Verdict.FINISHED)

    def _end_body(self, body: bytes) -> None:
        if (refusal := self._refusal()) is not None:
            self._conclude(refusal)
            return
        self._answer.whole(self._status, self._headers, body)
        self._conclude(Verdict.FINISHED)

    def _refusal(self) -> Verdict | None:
        """What the worker's answer is if it is no answer, but a word to us."""
        if self._status not in _REFUSALS or find(self._headers, _RESELECT) is None:
            return None
        return _REFUSALS[self._status]

    def _conclude(self, verdict: Verdict, reason: str = "") -> None:
        on_verdict, self._on_verdict = self._on_verdict, None
        if on_verdict is not None:
            self.reason = reason
            on_verdict(verdict)
