"""[P] One answer as it is heard, read by read: when its first token came, and how long each following one took."""

from __future__ import annotations

import re
from array import array
from typing import Final

from app.openai.sse import DONE, KEEPALIVE

_COUNTS: Final = re.compile(rb'"(?:completion|output)_tokens":\s*([0-9]+)')
_TAIL_BYTES: Final = 4096
_END: Final = b"\n\n"
_ENDS: Final = (
    DONE,
    b'"type":"message_stop"',
    b'"type":"response.completed"',
    b'"type":"response.incomplete"',
    b'"type":"response.failed"',
)
_ERRORS: Final = (b"event: error\n", b'data: {"error":')


class Hearing:
    """Times are seconds of one monotonic clock."""

    def __init__(self, began: float) -> None:
        self._last = began
        self._began = began
        self._waiting = False
        self.first: float | None = None
        """Since the beginning."""
        self.gaps = array("f")
        self.events = 0

    def heard(self, now: float, data: bytes) -> None:
        """A read of a stream. Keep-alives are silence, and so is what ends a stream without a token in it."""
        events = data.count(_END)
        if KEEPALIVE in data:
            events -= data.count(KEEPALIVE)
            if data.replace(KEEPALIVE, b"") == b"":
                return
        if events <= 1 and (data == DONE or b'"choices":[]' in data):
            return
        self.token(now, events)

    def attentive(self, now: float) -> None:
        """What was silent until now was the client: the next token is the first one of another answer."""
        if self.first is None:
            self._began = now
        self._last, self._waiting = now, True

    def token(self, now: float, events: int = 1) -> None:
        """So many events, or (0) a part of one."""
        if self.first is None:
            self.first = now - self._began
        elif self._waiting:
            pass  # a later answer's first token is no pause within an answer
        elif events:
            self.gaps.append(now - self._last)
        else:
            return  # the rest of this event is still to come
        self._last, self._waiting = now, False
        self.events += events


def tokens_of(body: bytes, events: int) -> int:
    """How many tokens an answer says that it has; if it does not say, about as many as it had events."""
    told = _COUNTS.findall(body[-_TAIL_BYTES:])
    return int(told[-1]) if told else events


def problem_of(*, streams: bool, status: int, body: bytes, broken: str) -> str:
    """What a client sees to be wrong with an answer without knowing what it should be; "" if nothing."""
    if broken:
        return broken
    if status != 200:
        return f"status {status}"
    if not streams:
        return ""
    if any(mark in body for mark in _ERRORS):
        return "an error event"
    return "" if any(mark in body[-_TAIL_BYTES:] for mark in _ENDS) or _whole_response(body) else "cut without its end"


def _whole_response(body: bytes) -> bool:
    """The closing event of a response repeats its text, so its type may be far from the end."""
    last = body[body.rfind(b"event: ") :]
    return last.startswith((b"event: response.completed", b"event: response.incomplete"))
