"""One attempt of a request on one worker: reads the worker's answer and decides what of it may leave.

A complete (JSON) answer is held until it is whole; of an event stream, whole events leave. So whatever breaks before
the first event, or anywhere in a held answer, breaks unseen, and the request can run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from app.fleet.replica import Replica
from app.http_headers import find
from app.openai.answers import Form, NoAnswer, check_beginning, check_coding, form_of
from app.openai.errors import Header
from app.openai.frames import BadFrame, FrameReader
from app.openai.sse import EventSplitter, EventTooLarge, NotEvents, without_leading_comments
from app.openai.surface import RelayRoute
from app.openai.units import BadNote, NoteLog, UnitSplitter
from app.upstream.connection import Break, UpstreamConnection, UpstreamError
from workers.contract import HEADER_RESELECT, HEADER_STREAM, STREAM_FRAMED
from workers.resume import CODE_RESUME_UNSUPPORTED

_RESELECT = HEADER_RESELECT.encode()
_STREAM = HEADER_STREAM.encode()
_FRAMED = STREAM_FRAMED.encode()

MAX_COMMENT_BYTES = 1024 * 1024
"""Of comments before the first event: a sign of life every second for hours, and no more."""


MAX_REFUSAL_BYTES = 4096
"""Of the body of a refusal to go on, what is looked through for its code."""


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
    SILENT = "silent"
    """The worker was given up for its silence."""
    UNRESUMED = "unresumed"
    """The worker will not go on with the answer that another one had begun. Nothing was started."""
    UNUSABLE = "unusable"
    """What came is no answer: not HTTP, not of this route, or not what its head says."""
    FAILED = "failed"
    """A bug of ours, in the middle of what came. Its notes may be written down and its events not be delivered, so
    nobody may go on from there."""


_REFUSALS = {401: Verdict.UNTRUSTED, 503: Verdict.RESELECT}
_NOT_NOW = frozenset((403, 408, 425, 429))
_NOT_HERE = 409
"""To a resume, with the code for it: this worker cannot go on exactly. Of every other kind, another one is asked."""
_NO_SUCH_FORM = frozenset((400, 404, 413, 415, 422))
"""To a resume: the worker does not know its form, or this one is none; the next one would say the same."""
_LOST = {Break.STALE: Verdict.STALE, Break.JUNK: Verdict.UNUSABLE}


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

    def noted(self) -> None:
        """Some of a complete answer was generated that comes behind notes."""
        ...


class Attempt:
    """An ``UpstreamSink``. Says its verdict once, at the latest when nothing more can come; ``reason`` says why it is
    BROKEN, SILENT, UNRESUMED or UNUSABLE."""

    __slots__ = (
        "_answer",
        "_comment_bytes",
        "_connection",
        "_ended",
        "_form",
        "_frame",
        "_headers",
        "_held",
        "_held_bytes",
        "_log",
        "_max_held",
        "_on_verdict",
        "_parting",
        "_route",
        "_splitter",
        "_status",
        "_streaming",
        "progress_at",
        "reason",
        "replica",
        "responded",
        "resumes",
    )

    def __init__(
        self,
        replica: Replica,
        connection: UpstreamConnection,
        route: RelayRoute,
        answer: Answer,
        *,
        streaming: bool,
        max_held: int,
        on_verdict: Callable[[Verdict], None],
        log: NoteLog,
        resumes: bool = False,
    ) -> None:
        """``log``: where the notes of all attempts go. ``resumes``: the worker is asked to go on with what they say."""
        self.replica = replica
        self.reason = ""
        self.responded = False
        self.progress_at = time.monotonic()
        self._on_verdict: Callable[[Verdict], None] | None = on_verdict
        self._connection: UpstreamConnection | None = connection
        self._route = route
        self._answer = answer
        self._streaming = streaming
        self._log = log
        self.resumes = resumes
        self._max_held = max_held
        self._status = 0
        self._form = Form.ERROR
        self._headers: list[Header] = []
        self._splitter: EventSplitter | UnitSplitter | None = None
        self._frame: FrameReader | None = None
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
        """End, because the relay has lost patience, unless the answer's end was there already."""
        self._abort()
        self._conclude(Verdict.FINISHED if self._ended else Verdict.SILENT, reason)

    def _unusable(self, reason: str) -> None:
        """End, because of what the worker sends; whatever follows the answer's end does not matter."""
        self._abort()
        self._conclude(Verdict.FINISHED if self._ended else Verdict.UNUSABLE, reason)

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
        try:
            check_coding(find(headers, b"content-encoding"))
            self._form = form_of(status, find(headers, b"content-type") or b"", self._route, streaming=self._streaming)
        except NoAnswer as error:
            self._unusable(str(error))
            return
        if self._form is Form.EVENTS:
            noted = find(headers, _STREAM)
            if noted is None:
                self._splitter = EventSplitter()
                if self.resumes:
                    self._unusable("it goes on with an answer without a note")
            elif noted == _FRAMED:
                self._frame = FrameReader(self._log)
                if self._streaming:
                    self._unusable("it answered with a whole answer where a stream was asked for")
            else:
                self._splitter = UnitSplitter(self._log, resumes=self.resumes)

    def read(self, data: bytes, done: bool) -> None:
        # A worker's comments alone are no progress: they would hide a stall for ever. Its steps are its sign of life.
        if (self._splitter is None and self._frame is None) or data[:1] != b":" or b"\ndata:" in data:
            self.progress_at = time.monotonic()
            self.responded = True
        if done:
            self._connection = None  # it is back in the pool, and no longer ours
        if self._splitter is not None:
            self._read_events(self._splitter, data, done)
        elif self._frame is not None:
            self._read_frame(self._frame, data, done)
        else:
            self._read_body(data, done)

    def lost(self, error: UpstreamError) -> None:
        self._connection = None
        if self._ended:
            self._conclude(Verdict.FINISHED)
        elif error.kind is Break.OURS:
            self._conclude(Verdict.FAILED)
        elif (refusal := self._refusal()) is not None:
            self._conclude(refusal)
        else:
            self._conclude(_LOST.get(error.kind, Verdict.BROKEN), error.kind.value)

    def _read_events(self, splitter: EventSplitter | UnitSplitter, data: bytes, done: bool) -> None:
        try:
            events = splitter.feed(data)
        except (EventTooLarge, NotEvents, BadNote) as error:
            self._unusable(str(error))
            return
        if events and not self._answer.delivered:
            # A comment says nothing yet: it must not cost the request its second chance.
            said = without_leading_comments(events)
            self._comment_bytes += len(events) - len(said)
            if self._comment_bytes > MAX_COMMENT_BYTES:
                self._unusable("it sends comments and no event")
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

    def _read_frame(self, frame: FrameReader, data: bytes, done: bool) -> None:
        """A whole answer behind notes: what was generated of it so far, and then what would have come without them."""
        known, notes = frame.head_known, frame.notes
        try:
            body = frame.feed(data)
            if frame.head_known and not known:
                self._status, self._headers = frame.status, frame.headers
                check_coding(find(frame.headers, b"content-encoding"))
                kind = find(frame.headers, b"content-type") or b""
                self._form = form_of(frame.status, kind, self._route, streaming=self._streaming)
                if self._form is Form.EVENTS:
                    raise NoAnswer("its whole answer is an event stream")
        except (BadFrame, BadNote, NoAnswer) as error:
            self._unusable(str(error))
            return
        if frame.notes > notes:
            self.progress_at = time.monotonic()
            self.responded = True
            self._answer.noted()
        if (body or frame.ended) and not self._ended:
            self._read_body(body, frame.ended)
        if done and self._ended:
            self._conclude(Verdict.FINISHED)
        elif done and not frame.ended:
            self._conclude(Verdict.BROKEN, "its answer ended early")

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
                self._part(b"".join(self._held))
        if done:
            self._finish()

    def _part(self, body: bytes) -> None:
        """Too much to be held: what there is leaves, if it can be an answer."""
        self._held.clear()
        if self._form is Form.ERROR:  # none has so much to say
            self._unusable(f"it answered {self._status} with more than {self._max_held} bytes")
        elif self._begins_well(body):
            self._parting = True
            self._answer.part(self._status, self._headers, body, False)

    def _begins_well(self, body: bytes) -> bool:
        try:
            check_beginning(self._form, body)
        except NoAnswer as error:
            self._unusable(str(error))
            return False
        return True

    def _end_body(self, body: bytes) -> None:
        if (refusal := self._refusal(body)) is not None:
            reason = CODE_RESUME_UNSUPPORTED if self._status == _NOT_HERE else f"status_{self._status}"
            self._conclude(refusal, reason)
            return
        if self.resumes and self._status >= 400 and self._frame is None:
            self._unusable(f"it answered {self._status} to a resume")
            return
        if self._begun_in_frame and find(self._headers, _RESELECT) is not None:
            self._abort()
            self._conclude(Verdict.BROKEN, f"it answered {self._status} in the middle of its answer")
            return
        if not self._begins_well(body):
            return
        self._answer.whole(self._status, self._headers, body)
        self._finish()

    def _finish(self) -> None:
        """The whole answer is delivered. What frames it may end a little later than it does."""
        if self._connection is None:
            self._conclude(Verdict.FINISHED)
        else:
            self._ended = True

    @property
    def _begun_in_frame(self) -> bool:
        """Whether notes of a whole answer came: something was started then, whatever the worker says afterwards."""
        return self.notes > 0

    @property
    def notes(self) -> int:
        """How many came of a whole answer."""
        return 0 if self._frame is None else self._frame.notes

    def _refusal(self, body: bytes = b"") -> Verdict | None:
        """What the worker's answer is if it is no answer, but a word to us."""
        if self._begun_in_frame:
            return None
        status = self._status
        if find(self._headers, _RESELECT) is not None:
            if status in _REFUSALS:
                return _REFUSALS[status]
            if self.resumes and status in _NOT_NOW:
                return Verdict.RESELECT
        if not self.resumes or self._frame is not None:
            return None
        not_here = status == _NOT_HERE and CODE_RESUME_UNSUPPORTED.encode() in body[:MAX_REFUSAL_BYTES]
        return Verdict.UNRESUMED if not_here or status in _NO_SUCH_FORM else None

    def _conclude(self, verdict: Verdict, reason: str = "") -> None:
        on_verdict, self._on_verdict = self._on_verdict, None
        if on_verdict is not None:
            self.reason = reason
            on_verdict(verdict)
