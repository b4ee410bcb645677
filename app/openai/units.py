"""[P] Units of a worker's stream, and the token notes that stand before them.

A worker that is asked to by ``x-hotspare-stream: 1``, and answers with the same header, puts a comment line before each
*unit*, the events that it made of one output of its engine:

    : t e=2 n=1 c=9f02ab13 g=0:318
    data: {...}

``e`` and ``c`` are the running count and crc32 of all event bytes including this unit, ``n`` the events of this unit,
at most 9999; what follows (``g``, and ``l``, ``t``, ``p``, ``x``) is for whoever resumes the request. A unit leaves
here whole or not at all, without its note, and the note is kept in few bytes: nearly every stream ends without having
needed one.

Outside of units there are comments only, which are neither counted nor held back for longer than it takes to be whole.
"""

from __future__ import annotations

import re

from app.openai.sse import MAX_EVENT_BYTES, EventTooLarge

NOTE = b": t "
_NEXT = b"\n" + NOTE
_FORM = re.compile(rb"e=([0-9]{1,18}) n=([0-9]{1,4}) c=([0-9a-f]{1,8})(?: ([^\r\n]*))?")

MAX_LOG_BYTES = 8 * 1024 * 1024
"""What is kept of the notes of one stream; one that needs more is not resumed."""


class BadNote(ValueError):
    """A token note that cannot be read: a broken worker."""


class NoteLog:
    """What a client was sent of one answer, as its worker's notes tell it.

    ``events`` and ``crc`` are those of the last unit. ``rest`` has a line for each note: its groups, or, if it says
    more than groups, everything from ``g=`` on as it came.
    """

    __slots__ = ("crc", "events", "overflowed", "rest")

    def __init__(self) -> None:
        self.events = 0
        self.crc = b"0"
        self.rest = bytearray()
        self.overflowed = False
        """The notes were more than is kept: this answer cannot be resumed."""

    def add(self, said: bytes) -> None:
        """The line of one more note."""
        if self.overflowed:
            return
        self.rest += said[2:] if said.startswith(b"g=") and b" " not in said else said
        self.rest += b"\n"
        if len(self.rest) > MAX_LOG_BYTES:
            self.overflowed = True
            self.rest = bytearray()


class UnitSplitter:
    """Bytes in, whole units out, their notes into ``log``; the rest is held back.

    Usually a read is a unit. What comes in many reads is looked through once, not again with each of them: of the unit
    that is held, it is known how many events its note says, and how far they were counted.
    """

    __slots__ = ("_counted_to", "_held", "_limit", "_missing", "log")

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit_bytes
        self._held = bytearray()
        self._missing = 0
        """How many events of what is held have not been counted yet; 0 if no note's line is complete there."""
        self._counted_to = 0
        self.log = NoteLog()

    @property
    def incomplete(self) -> bool:
        """Whether something has begun that did not end."""
        return bool(self._held.strip(b"\r\n"))

    def feed(self, data: bytes) -> bytes:
        """The whole units that ``data`` completes, joined, without their notes; empty if none.

        Raises:
            EventTooLarge: more than the limit came without an end.
            BadNote: a note is not one.
        """
        if self._held:
            if not self._completes(data):
                self._check_size()
                return b""
            data = bytes(self._held)
            self._held.clear()
            self._missing = 0
        last = data.rfind(_NEXT) + 1
        end = self._end(data, last)
        if end < len(data):
            self._held += data[end:]
            self._check_size()
        if not end:
            return b""
        whole = data if end == len(data) else data[:end]
        if (last and _NEXT in whole) or not whole.startswith(NOTE):
            return self._strip_all(whole)
        return self._strip_one(whole)

    def _check_size(self) -> None:
        if len(self._held) > self._limit:
            raise EventTooLarge(f"a unit of events is longer than {self._limit} bytes")

    def _completes(self, data: bytes) -> bool:
        """Add to what is held; whether something may be whole then. Ends and notes may lie across the cut."""
        held = self._held
        before = len(held)
        held += data
        if held.find(_NEXT, max(0, before - len(_NEXT) + 1)) >= 0:
            return True
        if not self._missing:
            return b"\n" in data if held.startswith(NOTE) else held.find(b"\n\n", max(0, before - 1)) >= 0
        while self._missing and (end := held.find(b"\n\n", self._counted_to)) >= 0:
            self._counted_to = end + 2
            self._missing -= 1
        self._counted_to = max(self._counted_to, len(held) - 1)
        return not self._missing

    def _end(self, data: bytes, last: int) -> int:
        """Where the last whole unit ends; ``last`` is where the last note begins, if there are several."""
        if not data.startswith(NOTE, last):
            return data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        line_end = data.find(b"\n", last)
        if line_end < 0:
            return last
        events = _events_of(data, last, line_end)
        if data.count(b"\n\n", line_end + 1) < events:
            self._missing = events
            self._counted_to = line_end + 1 - last
            return last
        return max(line_end + 1, data.rfind(b"\n\n", line_end + 1) + 2)

    def _strip_one(self, unit: bytes) -> bytes:
        note, _, events = unit.partition(b"\n")
        self._read(note[len(NOTE) :])
        return events

    def _strip_all(self, units: bytes) -> bytes:
        """Notes may stand anywhere between units; splitting at them takes the line end before each."""
        before, *parts = (b"\n" + units).split(_NEXT)
        out = [before[1:]]
        for part in parts:
            note, _, events = part.partition(b"\n")
            self._read(note)
            if out[-1]:
                out.append(b"\n")
            out.append(events)
        return b"".join(out)

    def _read(self, note: bytes) -> None:
        match = _FORM.fullmatch(note)
        if match is None:
            raise BadNote("a token note cannot be read")
        events, _, crc, said = match.groups()
        self.log.events = int(events)
        self.log.crc = crc
        self.log.add(said or b"")


def _events_of(data: bytes, start: int, line_end: int) -> int:
    note = data[start + len(NOTE) : line_end]
    match = _FORM.fullmatch(note)
    if match is None:
        raise BadNote("a token note cannot be read")
    return int(match[2])
