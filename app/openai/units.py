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
from binascii import crc32

from app.openai.sse import MAX_EVENT_BYTES, EventTooLarge, check_beginning

NOTE = b": t "
_NEXT = b"\n" + NOTE
_FORM = re.compile(rb"e=([0-9]{1,18}) n=([0-9]{1,4}) c=([0-9a-f]{1,8})(?: ([^\r\n]*))?")
_UNRESUMABLE = re.compile(rb"(?:^| )x=([a-z_]{1,40})(?: |$)")
_FIRST_OF_GROUP = re.compile(rb":[0-9]")

MAX_LOG_BYTES = 8 * 1024 * 1024
"""What is kept of the notes of one stream; one that needs more is not resumed."""
MOST_TOKENS = 1 << 31
_LOOK_BYTES = 512
"""Tokens are counted anew when the notes have grown by so much at least."""


class BadNote(ValueError):
    """A token note that cannot be read, or does not fit what was sent: a broken worker."""


class NoteLog:
    """What a client was sent of one answer, as its worker's notes tell it: all attempts at it write into the same one.

    ``events`` and ``crc`` are those of the last unit. ``rest`` has a line for each note: its groups, or, if it says
    more than groups, everything from ``g=`` on as it came.
    """

    __slots__ = ("_look_at", "_max_tokens", "crc", "events", "rest", "unresumable")

    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        """``max_tokens``: an answer of about so many more is not resumed."""
        self.events = 0
        self.crc = b"0"
        self.rest = bytearray()
        self.unresumable = ""
        """Why this answer cannot be resumed, if so: ``tokens`` or ``notes`` (more than are kept), ``engine:WORD`` (a
        note says it). Nothing is kept of its notes then."""
        self._max_tokens = max_tokens
        self._look_at = first_look(max_tokens)

    def add(self, said: bytes) -> None:
        """The line of one more note."""
        if self.unresumable:
            return
        if said.startswith(b"g=") and b" " not in said:
            self.rest += said[2:]
        else:
            self.rest += said
            if b"x=" in said and (match := _UNRESUMABLE.search(said)) is not None:
                self.give_up(f"engine:{match[1].decode()}")
                return
        self.rest += b"\n"
        if len(self.rest) > self._look_at:
            self._look()

    def _look(self) -> None:
        """A token takes two bytes at least, so there is no need to look often."""
        size, tokens = len(self.rest), self.tokens
        if size > MAX_LOG_BYTES:
            self.give_up("notes")
        elif tokens > self._max_tokens:
            self.give_up("tokens")
        else:
            self._look_at = min(MAX_LOG_BYTES, size + max(_LOOK_BYTES, 2 * (self._max_tokens - tokens)))

    @property
    def tokens(self) -> int:
        """Of all choices."""
        said = bytes(self.rest)
        if b"=" in said:
            said = b"\n".join(_groups_of(line) for line in said.split(b"\n"))
        return said.count(b",") + len(_FIRST_OF_GROUP.findall(said))

    def give_up(self, reason: str) -> None:
        self.unresumable = reason
        self.rest = bytearray()

    def clear(self) -> None:
        """The answer begins again from its start."""
        self.events = 0
        self.crc = b"0"
        self.rest = bytearray()
        self.unresumable = ""
        self._look_at = first_look(self._max_tokens)


def first_look(max_tokens: int) -> int:
    """How many bytes of notes there can be before there may be too many tokens."""
    return min(MAX_LOG_BYTES, 2 * max_tokens)


def _groups_of(line: bytes) -> bytes:
    if b"=" not in line:
        return line
    return next((word[2:] for word in line.split(b" ") if word.startswith(b"g=")), b"")


class UnitSplitter:
    """Bytes in, whole units out, their notes into ``log``; the rest is held back.

    Usually a read is a unit. What comes in many reads is looked through once, not again with each of them: of the unit
    that is held, it is known how many events its note says, and how far they were counted.

    What a note says is held against the log and against its events, so that a worker that repeats some, or leaves some
    out, is found out before any of them leaves. The checksum is computed where it matters, at the joint of two workers.
    """

    __slots__ = ("_begun", "_counted_to", "_held", "_joins", "_limit", "_missing", "log")

    def __init__(
        self, log: NoteLog | None = None, *, resumes: bool = False, limit_bytes: int = MAX_EVENT_BYTES
    ) -> None:
        """``log``: of the answer so far; ``resumes``: another worker wrote it, and this one was asked to go on."""
        self._limit = limit_bytes
        self._held = bytearray()
        self._missing = 0
        """How many events of what is held have not been counted yet; 0 if no note's line is complete there."""
        self._counted_to = 0
        self._begun = False
        self._joins = resumes
        """The next note is the first one after another worker's."""
        self.log = NoteLog() if log is None else log

    @property
    def incomplete(self) -> bool:
        """Whether something has begun that did not end."""
        return bool(self._held.strip(b"\r\n"))

    def feed(self, data: bytes) -> bytes:
        """The whole units that ``data`` completes, joined, without their notes; empty if none.

        Raises:
            EventTooLarge: more than the limit came without an end.
            BadNote: a note is not one, or what came is not what the notes say. Then the log has none of the notes that
                came with it.
            NotEvents: the stream begins as none can.
        """
        if not self._begun and data:
            check_beginning(data)
            self._begun = True
        if self._held:
            if not self._completes(data):
                self._check_size()
                return b""
            data = bytes(self._held)
            self._held.clear()
            self._missing = 0
        last = data.rfind(_NEXT) + 1
        if not last and data.startswith(NOTE) and (line_end := data.find(b"\n")) > 0:
            note = _FORM.fullmatch(data, len(NOTE), line_end)
            if note is not None and data.count(b"\n\n", line_end + 1) == int(note[2]) > 0 and data.endswith(b"\n\n"):
                return self._one(note, data[line_end + 1 :])
        end = self._end(data, last)
        if end < len(data):
            self._held += data[end:]
            self._check_size()
        return self._strip(data[:end]) if end else b""

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
        events = int(_form_of(data[last + len(NOTE) : line_end])[2])
        if data.count(b"\n\n", line_end + 1) < events:
            self._missing = events
            self._counted_to = line_end + 1 - last
            return last
        return max(line_end + 1, data.rfind(b"\n\n", line_end + 1) + 2)

    def _one(self, note: re.Match[bytes], events: bytes) -> bytes:
        """A unit that is whole, with nothing before it and nothing behind it."""
        _check_count(note, self.log.events)
        if self._joins:
            self._check_joint(note, events)
        _write(self.log, note)
        return events

    def _strip(self, units: bytes) -> bytes:
        """Notes may stand anywhere between units; splitting at them takes the line end before each."""
        before, *parts = (b"\n" + units).split(_NEXT)
        out = [before[1:]]
        _check_comments(before)
        notes: list[re.Match[bytes]] = []
        count = self.log.events
        for at, part in enumerate(parts, 1):
            line, _, events = part.partition(b"\n")
            if out[-1] and len(out) == 1:
                out.append(b"\n")
            if events and at < len(parts):
                events += b"\n"
            note = _form_of(line)
            count = _check_count(note, count)
            end = _end_of_events(events, int(note[2]))
            if self._joins:
                self._check_joint(note, events[:end])
            notes.append(note)
            out.append(events)
        for note in notes:  # all of them are good: what the log says is what leaves here
            _write(self.log, note)
        return b"".join(out)

    def _check_joint(self, note: re.Match[bytes], events: bytes) -> None:
        """The first unit of another worker: its checksum must be the one so far, gone on with."""
        self._joins = False
        if crc32(events, int(self.log.crc, 16)) != int(note[3], 16):
            raise BadNote("it goes on with another answer than the one that was begun")


def read_note(log: NoteLog, note: bytes) -> None:
    """The note of an answer that has no events: its line without its beginning (``NOTE``) and end, into the log.

    Raises:
        BadNote: it is none.
    """
    match = _form_of(note)
    if int(match[1]) or int(match[2]):
        raise BadNote("a token note counts events where there are none")
    _write(log, match)


def _write(log: NoteLog, note: re.Match[bytes]) -> None:
    events, _, crc, said = note.groups()
    log.events = int(events)
    log.crc = crc
    log.add(said or b"")


def _form_of(note: bytes) -> re.Match[bytes]:
    match = _FORM.fullmatch(note)
    if match is None:
        raise BadNote("a token note cannot be read")
    return match


def _check_count(note: re.Match[bytes], before: int) -> int:
    """How many events there are with this unit; ``before``: without."""
    count = int(note[1])
    if count != before + int(note[2]):
        raise BadNote("a token note does not go on where the one before it ended")
    return count


def _end_of_events(unit: bytes, new: int) -> int:
    """Where the events of a unit end. Comments may follow."""
    end = 0
    for _ in range(new):
        end = unit.find(b"\n\n", end) + 2
        if end < 2:
            raise BadNote("a unit has fewer events than its note says")
    if end < len(unit):
        _check_comments(unit[end:])
    return end


def _check_comments(data: bytes) -> None:
    """What stands outside of units. ``splitlines`` ends lines where a reader of events does."""
    if not all(line.startswith(b":") for line in data.splitlines() if line):
        raise BadNote("an event came that no note had counted")
