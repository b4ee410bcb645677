"""An answer on its way to the gateway, recorded so that another engine can go on with it.

The engine's serving layer turns each output that it pulls into events: none, one, or several. Those of one pull are a
*unit*; they are held until the next pull is asked for, and leave in one message behind their note. A unit is therefore
whole or not there at all, which is what lets a resume reproduce it: within one, a token that was sampled anew could
contradict events that have left.

A resumed request runs through the same: the engine replays the outputs that the notes name, the serving layer makes its
events again, and they are counted and dropped here. The response's head is held until count and checksum are those that
the client has seen; if they are not, the answer is a 409 and nothing was said.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from hashlib import blake2b
from typing import Final, Literal

from workers import metrics
from workers.asgi import UNRESUMABLE, Message, Scope, Send, respond_error
from workers.contract import HEADER_RESELECT, HEADER_STREAM, STREAM_FRAMED
from workers.resume import (
    CODE_RESUME_UNSUPPORTED,
    MAX_UNIT_EVENTS,
    Choices,
    Resume,
    crc32,
    encode_framed,
    encode_outputs,
    note,
    reason_word,
)

FRAME_NOTE_SECONDS: Final = 0.05
"""Notes of a whole answer leave at most so often: what a death in between costs is made again."""

ASKED: Final = (HEADER_STREAM.encode(), b"1")
"""Of a request: its sender wants notes; of a stream: it has them."""

_EVENT_STREAM: Final = b"text/event-stream"
_FRAME_HEAD: Final = [
    (b"content-type", _EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (HEADER_STREAM.encode(), STREAM_FRAMED.encode()),
]

Cause = Literal["engine", "origin", "mismatch", "ended", "notes"]
"""Of a 409, for metrics: the engine says so; the answer was made from something else; other events came out; the replay
ended the answer; the notes say so."""

RECORDER: Final[ContextVar[Recorder | None]] = ContextVar("hotspare_recorder", default=None)
"""The recorder of the request that this task answers; ``None`` if nobody asked for notes."""


class ResumeRefusedError(Exception):
    """This engine cannot go on exactly where the other one stopped; the message says why. Nothing was sent."""

    def __init__(self, message: str, *, cause: Cause = "engine") -> None:
        super().__init__(message)
        self.cause = cause


class Recorder:
    """One request's answer. The engine calls ``output`` and ``end_unit``; its application sends through ``send``."""

    def __init__(self, send: Send, *, root: str, resume: Resume | None = None, scope: Scope | None = None) -> None:
        """``root``: what all ids of the answer are made from, the same on every attempt. ``scope``: the request's, as
        whoever counts requests knows it; there it will stand if nobody could go on with the answer."""
        self._send = send
        self._scope = scope
        self._root = root
        self.resume = resume
        self.created = int(time.time()) if resume is None or resume.created is None else resume.created
        """Unix seconds, for whatever says when the answer was made."""
        self._ids = 0
        self._generations = 0
        self._replaying = resume is not None
        self._events = 0
        self._crc = 0
        self._outputs: list[str] = []
        self._logprobs: list[str] = []
        self._rest = "" if resume is not None else f"t={self.created}"
        self._unresumable = ""
        self._unit: list[bytes] = []
        self._start: Message | None = None
        self._started = False
        self._stream = False
        self._framed = False
        self._framed_at = 0.0
        self._refused = False

    def new_id(self) -> str:
        """The next of this answer's ids, 32 hexadecimal digits: every attempt makes the same ones in the same order."""
        self._ids += 1
        return blake2b(f"{self._root}/{self._ids}".encode(), digest_size=16).hexdigest()

    @property
    def replaying(self) -> bool:
        """Whether what the application sends is what the client has already."""
        return self._replaying

    @property
    def begun(self) -> bool:
        """Whether anything of the answer has left."""
        return self._started

    @property
    def refused(self) -> bool:
        """Whether a 409 or a 503 has left: nothing that follows is sent."""
        return self._refused

    # What the engine says

    def generates(self) -> None:
        """The engine begins to generate for this answer. Notes do not tell several generations of one answer apart.

        Raises:
            ResumeRefusedError: it is not the first, and the notes are being replayed.
        """
        self._generations += 1
        if self._generations > 1:
            if self._replaying:
                raise ResumeRefusedError("it is generated in several parts")
            self.unresumable("several_generations")

    def made_from(self, key: str) -> None:
        """What this answer is made from: a checksum over prompt and configuration, without spaces.

        Raises:
            ResumeRefusedError: the answer that is being replayed was made from something else.
        """
        if not self._replaying or self.resume is None:
            if self._generations < 2:
                self._say(f"k={key}")
        elif self.resume.key != key:
            raise ResumeRefusedError("its prompt or its configuration is another one here", cause="origin")

    def output(
        self,
        output: Choices,
        *,
        logprobs: str = "",
        cached_tokens: int | None = None,
        cache_writes: int | None = None,
    ) -> None:
        """The serving layer is about to be given this, which was not replayed. ``logprobs`` is the engine's own text,
        without spaces, ``|`` and line ends; prompt tokens from and to the prefix cache only with the first output."""
        self._outputs.append(encode_outputs((output,)))
        if logprobs:
            self._logprobs.append(logprobs)
        if cached_tokens is not None:
            self._say(f"p={cached_tokens}")
        if cache_writes is not None:
            self._say(f"w={cache_writes}")

    def unresumable(self, reason: str) -> None:
        """From here on nobody could go on with this answer; ``reason`` is one word (``workers.resume.reason_word``)."""
        if not self._unresumable:
            self._unresumable = reason_word(reason)
            if self._scope is not None:
                self._scope[UNRESUMABLE] = reason
            self._say(f"x={reason}")

    def _say(self, word: str) -> None:
        self._rest = f"{self._rest} {word}" if self._rest else word

    async def end_unit(self) -> None:
        """The serving layer has sent all that the last output gave: it asks for the next one, or nothing comes for a
        while."""
        if not self._replaying and self._unit and self._unit[-1].endswith(b"\n\n"):
            await self._pass_unit(last=False)

    async def note_alone(self) -> None:
        """The same for an answer that is sent whole at its end: tell what was generated so far."""
        now = asyncio.get_running_loop().time()
        if self._replaying or self._refused or self._stream or now - self._framed_at < FRAME_NOTE_SECONDS:
            return
        self._framed = True
        self._framed_at = now
        await self._pass(note(events=0, new=0, crc=0, rest=self._take_rest()), last=False)

    async def replayed(self) -> None:
        """The serving layer has made its events for all outputs of the resume.

        Raises:
            ResumeRefusedError: they are not what the client has.
        """
        resume = self.resume
        if resume is None or not self._replaying:
            return
        if (self._events, self._crc) != (resume.events, resume.crc):
            raise ResumeRefusedError(
                f"the replay gave {self._events} events with checksum {self._crc:x}, "
                f"the client has {resume.events} with {resume.crc:x}",
                cause="mismatch",
            )
        self._replaying = False

    async def refuse(self, reason: str, *, cause: Cause = "engine") -> None:
        """Answer 409: another engine may be able to go on, this one is not. What the application sends is dropped."""
        if self._refused or self._started:
            return
        self._refused = True
        metrics.record_resume(cause)
        await respond_error(
            self._send,
            409,
            message=f"this answer cannot be resumed here: {reason}",
            kind="invalid_request_error",
            code=CODE_RESUME_UNSUPPORTED,
        )

    async def turn_away(self, reason: str) -> None:
        """Answer 503: nothing was started, another worker is to be asked. As :meth:`refuse`, for want of room."""
        if self._refused or self._started:
            return
        self._refused = True
        await respond_error(
            self._send,
            503,
            message=f"this engine takes no more requests: {reason}",
            kind="service_unavailable",
            code="overloaded",
            headers=((HEADER_RESELECT, "1"),),
        )

    # What the application sends

    async def send(self, message: Message) -> None:
        """The application's ``send``."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            await self._head(message)
        elif message["type"] == "http.response.body":
            await self._body(message.get("body", b""), last=not message.get("more_body", False))
        else:
            await self._send(message)

    async def _head(self, message: Message) -> None:
        self._start = message
        headers = message["headers"]
        self._stream = any(
            name.lower() == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in headers
        )
        if self._stream:
            self._start = {**message, "headers": [*headers, ASKED]}

    async def _body(self, body: bytes, *, last: bool) -> None:
        if not self._stream:
            await self._whole(body, last=last)
        elif self._replaying:
            self._drop(body)
            if last:
                await self.refuse("its replay ended the answer", cause="ended")
        elif body.startswith(b":"):  # a comment: of no unit, and it need not wait for one
            await self._pass(body, last=last)
        else:
            if body:
                self._unit.append(body)
            if last:
                await self._pass_unit(last=True)

    def _drop(self, body: bytes) -> None:
        if not body.startswith(b":"):
            self._events += body.count(b"\n\n")
            self._crc = crc32(body, self._crc)

    async def _whole(self, body: bytes, *, last: bool) -> None:
        """An answer that is no stream: as it is, or in a frame if notes have left before it."""
        if not self._framed:
            await self._pass(body, last=last)
            return
        self._unit.append(body)
        if last and self._start is not None:
            start = self._start
            headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            await self._pass(encode_framed(start["status"], headers, b"".join(self._unit)), last=True)

    async def _pass_unit(self, *, last: bool) -> None:
        unit = b"".join(self._unit)
        self._unit.clear()
        new = unit.count(b"\n\n")
        if new > MAX_UNIT_EVENTS:
            unit = self._in_parts(unit)
        elif new:
            unit = self._noted(unit, new)
        await self._pass(unit, last=last)

    def _noted(self, unit: bytes, new: int) -> bytes:
        self._events += new
        self._crc = crc32(unit, self._crc)
        return note(events=self._events, new=new, crc=self._crc, rest=self._take_rest()) + unit

    def _in_parts(self, unit: bytes) -> bytes:
        """More events than a note can stand for: as several units in one message. The first note has all outputs, so a
        resume from between them finds other counts, and is refused; from behind them it is as exact as any."""
        events = unit.split(b"\n\n")
        rest = events.pop()  # nothing, usually
        parts = []
        for at in range(0, len(events), MAX_UNIT_EVENTS):
            some = events[at : at + MAX_UNIT_EVENTS]
            parts.append(self._noted(b"\n\n".join(some) + b"\n\n", len(some)))
        return b"".join(parts) + rest

    def _take_rest(self) -> str:
        words = []
        if self._outputs:
            words.append("g=" + "|".join(self._outputs))
            self._outputs.clear()
        if self._logprobs:
            words.append("l=" + "|".join(self._logprobs))
            self._logprobs.clear()
        if self._rest:
            words.append(self._rest)
            self._rest = ""
        return " ".join(words)

    async def _pass(self, body: bytes, *, last: bool) -> None:
        if not self._started:
            self._started = True
            if self.resume is not None and not self._replaying:  # until now it could be refused
                metrics.record_resume("taken", tokens=self.resume.tokens)
            start = self._start
            if self._framed or start is None:
                start = {"type": "http.response.start", "status": 200, "headers": _FRAME_HEAD}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
