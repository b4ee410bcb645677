"""Server-sent events as bytes: where one event ends, without changing a byte of it. Pure.

The splitter lets whole events pass and holds an incomplete one back. Lines may end in LF, CRLF or CR; an event ends
with an empty line. The usual case, a read that ends exactly at ``\\n\\n``, costs one comparison and no copy.

One rule keeps the result the same however the bytes were cut: a CR at the very end of what came may be half of a CRLF,
so the splitter waits for the next byte, except after another CR: ``\\r\\r`` ends an event at once, and should a LF
follow, it stands at the head of the next event, where it means nothing.
"""

from __future__ import annotations

import re

import msgspec

from app.openai.errors import GatewayError

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""The closing event of a response repeats its whole text, so this is generous."""

_END = re.compile(rb"(?:\r\n|\n)(?:\r\n|\n|\r(?=[^\n]))|\r\r")
_COMMENTS = re.compile(rb"(?::[^\r\n]*+|[\r\n])*+")
_LONGEST_END = 4
_BEGINNINGS = b"deir:\r\n\xef"
"""First bytes of what an event can begin with: its fields, a comment, a line end, a byte order mark."""


class EventTooLarge(ValueError):
    """An event did not end within the limit: a broken worker."""


class NotEvents(ValueError):
    """What came is not server-sent events: a broken worker."""


def check_beginning(data: bytes) -> None:
    """Look at how a stream begins; ``data`` is not empty.

    Raises:
        NotEvents: no stream of events can begin so.
    """
    if data[0] not in _BEGINNINGS:
        raise NotEvents("what it sends is not server-sent events")


class EventSplitter:
    """Bytes in, whole events out; the rest is held back."""

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit_bytes
        self._rest = bytearray()
        self._begun = False

    @property
    def incomplete(self) -> bool:
        """Whether an event has begun that did not end. Line ends alone are not an event."""
        return bool(self._rest.strip(b"\r\n"))

    def feed(self, data: bytes) -> bytes:
        """The whole events that ``data`` completes, joined as they came; empty if none.

        Raises:
            EventTooLarge: more than ``limit_bytes`` came without an end.
            NotEvents: the stream begins as none can.
        """
        if not self._begun and data:
            check_beginning(data)
            self._begun = True
        rest = self._rest
        if not rest:
            if data.endswith(b"\n\n"):
                return data
            end = _last_end(data, 0)
            if len(data) - end > self._limit:
                raise EventTooLarge(f"an event is longer than {self._limit} bytes")
            rest += data[end:]
            return data[:end]
        start = max(0, len(rest) - _LONGEST_END)
        rest += data
        end = _last_end(rest, start)
        whole = bytes(rest[:end])
        del rest[:end]
        if len(rest) > self._limit:
            raise EventTooLarge(f"an event is longer than {self._limit} bytes")
        return whole


def _last_end(data: bytes | bytearray, start: int) -> int:
    """Index just after the last event that is complete, looking from ``start``; 0 if there is none."""
    end = data.rfind(b"\n\n", start) + 2
    if end < 2:
        end = 0
    if b"\r" in data:
        for match in _END.finditer(data, max(end, start)):
            end = match.end()
    return end


def split_events(events: bytes) -> list[bytes]:
    """Whole events, joined, into a list. What follows the last end is left out."""
    found = []
    start = 0
    for match in _END.finditer(events):
        found.append(events[start : match.end()])
        start = match.end()
    return found


def without_leading_comments(events: bytes) -> bytes:
    """Whole events, joined, from the first one on that says something to a client: of more than comments and line ends.
    Whoever sends comments at full speed decides how often this runs, so it takes no step per comment."""
    if events[:1] not in (b":", b"\n", b"\r"):
        return events
    said = _COMMENTS.match(events).end()  # type: ignore[union-attr]  # it matches at least nothing
    return b"" if said == len(events) else events[_last_end(events[: said + 1], 0) :]


def fields(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of one event."""
    name = b""
    data = []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(data)


def error_event(error: GatewayError, *, named: bool) -> bytes:
    """The end of a stream that cannot go on. ``named``: as routes with named events say it, ``event: error`` and the
    type in the data as well; the envelope stays beside it, for the SDKs that look for that."""
    if named:
        body = msgspec.json.encode({"type": "error", **error.envelope})
        return b"event: error\ndata: " + body + b"\n\n" + DONE
    return b"data: " + error.body + b"\n\n" + DONE
