"""[P] Whole answers that come behind token notes, as one event (``workers.resume.encode_framed``).

The notes are kept as those of a stream are. Of the event, status and headers are known before its body, and the body is
handed on as it comes: one that is larger than anybody wants to hold need not be held here.
"""

from __future__ import annotations

import re
from typing import Final

from app.openai.errors import Header
from app.openai.sse import MAX_EVENT_BYTES
from app.openai.units import NOTE, NoteLog, read_note

_DATA = b"data: "
_BEGIN = b"event: body"
_MAX_HEAD_LINES = 256
MAX_HEAD_BYTES: Final = 64 * 1024
"""Of all headers together, as of any other answer (``app.upstream.connection``)."""

_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\t\x20-\x7e\x80-\xff]*)")
"""What HTTP allows in one: a client's connection gets it as it is here."""


class BadFrame(ValueError):
    """What came is no framed answer: a broken worker."""


class FrameReader:
    """Bytes in, the answer's body out; notes go into ``log``."""

    __slots__ = (
        "_begun",
        "_head_bytes",
        "_held",
        "_in_data",
        "_limit",
        "_lines",
        "_several",
        "ended",
        "head_known",
        "headers",
        "log",
        "notes",
        "status",
    )

    def __init__(self, log: NoteLog, *, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        """``limit_bytes``: of one note or one line of the head."""
        self.log = log
        self.notes = 0
        """How many there were."""
        self.status = 0
        """Of the answer; 0 until it is known."""
        self.headers: list[Header] = []
        self.head_known = False
        """Status and headers are complete."""
        self.ended = False
        self._limit = limit_bytes
        self._held = bytearray()
        """A line whose end has not come."""
        self._lines = 0
        self._head_bytes = 0
        self._begun = False
        self._in_data = False
        self._several = False
        """A line of the body has ended; another one may follow."""

    @property
    def incomplete(self) -> bool:
        return bool(self._held) or (self._begun and not self.ended)

    @property
    def _reads_body(self) -> bool:
        return self._begun and not self.ended

    def feed(self, data: bytes) -> bytes:
        """What ``data`` brings of the answer's body; empty if nothing.

        Raises:
            BadFrame: it is something else, or a line is longer than the limit.
            BadNote: a note is not one.
        """
        if self._held:
            held = self._held
            held += data
            if not self._in_data and b"\n" not in data and not (self._reads_body and held.startswith(_DATA)):
                self._check_size()
                return b""
            data = bytes(held)
            held.clear()
        body: list[bytes] = []
        at = 0
        while at < len(data):
            if self._in_data:
                at = self._read_data(data, at, body)
                continue
            if self._reads_body and data.startswith(_DATA, at):
                if not self.status:
                    raise BadFrame("a framed answer has no status")
                self.head_known = True
                if self._several:
                    body.append(b"\n")
                self._in_data = True
                at += len(_DATA)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._held += data[at:]
                self._check_size()
                break
            self._line(data[at:end])
            at = end + 1
        return body[0] if len(body) == 1 else b"".join(body)

    def _check_size(self) -> None:
        if len(self._held) > self._limit:
            raise BadFrame(f"a line of a framed answer is longer than {self._limit} bytes")

    def _read_data(self, data: bytes, at: int, body: list[bytes]) -> int:
        end = data.find(b"\n", at)
        if end < 0:
            body.append(data[at:])
            return len(data)
        body.append(data[at:end])
        self._in_data = False
        self._several = True
        return end + 1

    def _line(self, line: bytes) -> None:
        if self.ended:
            if line and not line.startswith(b":"):
                raise BadFrame("more follows a framed answer")
        elif not self._begun:
            self._before(line)
        elif not line:
            if not self._several:
                raise BadFrame("a framed answer has no body")
            self.ended = True
        else:
            self._head(line)

    def _before(self, line: bytes) -> None:
        if line.startswith(NOTE):
            read_note(self.log, line[len(NOTE) :])
            self.notes += 1
        elif line == _BEGIN:
            self._begun = True
        elif line and not line.startswith(b":"):
            raise BadFrame("what it sends is no framed answer")

    def _head(self, line: bytes) -> None:
        name, _, value = line.partition(b": ")
        self._lines += 1
        self._head_bytes += len(line)
        if self.head_known or self._lines > _MAX_HEAD_LINES or self._head_bytes > MAX_HEAD_BYTES:
            raise BadFrame("a line of a framed answer cannot be read")
        if name == b"status" and value.isdigit() and len(value) == 3 and not self.status:
            self.status = int(value)
        elif name == b"header":
            header = _HEADER.fullmatch(value)
            if header is None:
                raise BadFrame("a header of a framed answer cannot be read")
            self.headers.append((header[1].lower(), header[2].strip(b" \t")))
        else:
            raise BadFrame("a line of a framed answer cannot be read")
