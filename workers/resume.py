"""[P] The forms that let another engine go on with an answer: token notes, the resume body, whole answers in a frame.

Like ``workers.contract``, this is for gateway and workers; the gateway keeps notes as bytes and reads nothing of them
but their counts. ``docs/resume.md`` says how it all fits together.

A **note** is one comment line before a unit of events (:mod:`workers.recorder`):

    : t e=2 n=1 c=9f02ab13 g=0:318,262|0:1204 p=16 t=1764450000

``e`` and ``c``: running count and crc32 (hex) of all event bytes including the unit; ``n``: events of the unit. ``g``:
the engine's outputs since the last note, in order, ``|`` between outputs, ``+`` between the choices of one, each
``choice:token,token``. ``l``: what the engine must know of their logprobs, its own form, ``|`` between outputs. ``p``
and ``w``: prompt tokens that came from the prefix cache, and that went into it; ``t``: when the answer was created,
unix seconds; ``k``: a checksum of what the answer is made from, prompt and configuration, in the engine's own form: one
for which it is another cannot go on. These in the first note that knows them. ``x``: from here on the answer cannot be
resumed, and why, in one word.

The **resume body** is a length (u32, little endian), a JSON object (``ResumeHead``), the notes as the gateway kept
them, one a line, without ``e``, ``n`` and ``c``, and then the original body, byte for byte.

A **framed answer** is a whole answer that travels behind notes, as one event whose unknown fields a reader of
server-sent events ignores:

    event: body
    status: 200
    header: content-type: application/json
    data: {"id":"chatcmpl-…","choices":[…]}
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

RESUME_CONTENT_TYPE: Final = "application/vnd.hotspare.resume"
"""Between gateway and worker only; refused from clients."""

CODE_RESUME_UNSUPPORTED: Final = "resume_unsupported"
"""Code of the 409 of a worker that cannot go on exactly. Nothing was started there."""

RESUMABLE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})

MAX_RESUME_HEAD_BYTES: Final = 4096
MAX_UNIT_EVENTS: Final = 9999
"""Events that one note can stand for."""

MAX_RESUME_TOKENS: Final = 132 * 1024
"""Of all choices; an empty output counts as one. What a gateway keeps by default (``resume_max_tokens``), and what it
may be over that before it looks."""

_LENGTH_BYTES: Final = 4
_CRC: Final = re.compile(r"[0-9a-f]{1,8}")
_WORD: Final = re.compile(r"[a-z_]{1,40}")
_CHOICE: Final = r"[0-9]{1,4}:(?:[0-9]{1,10}(?:,[0-9]{1,10})*+)?"
_OUTPUTS: Final = re.compile(rf"{_CHOICE}(?:[|+]{_CHOICE})*+")

Choices = list[tuple[int, list[int]]]
"""One output of the engine: (choice, its new token ids)."""

Header = tuple[bytes, bytes]


class ResumeError(ValueError):
    """A resume body, a note or a framed answer that cannot be read; the message says what is wrong with it."""


class ResumeHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the client has: ``events`` and ``crc`` as the last delivered unit's note says; ``notes`` is how many bytes
    of notes follow, ``attempt`` counts the times that the request was started, this one included."""

    events: int
    crc: str
    notes: int
    attempt: int = 2


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """A resume body, taken apart. Outputs and their logprobs go together; there are none if the engine noted none."""

    events: int
    crc: int
    attempt: int
    outputs: list[Choices]
    logprobs: list[str]
    created: int | None
    cached_tokens: int | None
    cache_writes: int | None = None
    key: str = ""
    """What the answer is made from; empty if no note said it."""
    unresumable: str
    """Why not, if a note said so."""

    @property
    def tokens(self) -> int:
        return sum(len(ids) for output in self.outputs for _, ids in output)


_head_encoder = msgspec.json.Encoder()
_head_decoder = msgspec.json.Decoder(ResumeHead)


def encode_outputs(outputs: Iterable[Choices]) -> str:
    """The text of ``g``."""
    return "|".join(["+".join([f"{choice}:{','.join(map(str, ids))}" for choice, ids in output]) for output in outputs])


def decode_outputs(text: str) -> list[Choices]:
    """Inverse of ``encode_outputs``.

    Raises:
        ResumeError: it is none.
    """
    if _OUTPUTS.fullmatch(text) is None:
        raise ResumeError("the tokens of a note cannot be read")
    return [[_choice(part) for part in output.split("+")] for output in text.split("|")]


def _choice(part: str) -> tuple[int, list[int]]:
    choice, _, ids = part.partition(":")
    return int(choice), [int(token) for token in ids.split(",")] if ids else []


def note(*, events: int, new: int, crc: int, rest: str) -> bytes:
    """A note's line. ``rest`` is what stands after the counts, for example ``g=0:318``; it may be empty."""
    return (f": t e={events} n={new} c={crc:x} {rest}\n" if rest else f": t e={events} n={new} c={crc:x}\n").encode()


def encode_resume(head: ResumeHead, notes: bytes | bytearray, body: bytes) -> bytes:
    """A resume body. ``head.notes`` must be the notes' length."""
    encoded = _head_encoder.encode(head)
    return b"".join((len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, notes, body))


def decode_resume(raw: bytes) -> tuple[Resume, bytes]:
    """A resume body → what it says, and the original body.

    Raises:
        ResumeError: it is none.
    """
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if not 0 < length <= MAX_RESUME_HEAD_BYTES or begin > len(raw):
        raise ResumeError("it does not begin with the length of its head")
    try:
        head = _head_decoder.decode(raw[_LENGTH_BYTES:begin])
    except msgspec.DecodeError as error:
        raise ResumeError(f"its head: {error}") from None
    if head.events < 0 or head.attempt < 1 or not _CRC.fullmatch(head.crc) or not 0 <= head.notes <= len(raw) - begin:
        raise ResumeError("a number in its head is out of range")
    end = begin + head.notes
    return _read_notes(head, raw[begin:end]), raw[end:]


def _read_notes(head: ResumeHead, notes: bytes) -> Resume:
    outputs: list[Choices] = []
    logprobs: list[str] = []
    numbers: dict[str, int] = {}
    key = unresumable = ""
    # Counted before anything is built of it: these are in every token, and those in every piece.
    if notes.count(b":") + notes.count(b",") > MAX_RESUME_TOKENS:
        raise ResumeError(f"its notes have more than {MAX_RESUME_TOKENS} tokens")
    if any(notes.count(separator) > 2 * MAX_RESUME_TOKENS for separator in (b"\n", b" ", b"|")):
        raise ResumeError("its notes have too many pieces")
    try:
        lines = notes.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise ResumeError("its notes are not ASCII") from None
    for line in lines:
        if not line:
            continue
        fields = dict(_field(word) for word in line.split(" ")) if "=" in line else {"g": line}
        if fields.get("g"):
            outputs += decode_outputs(fields["g"])
        if fields.get("l"):
            logprobs += fields["l"].split("|")
        for name in ("t", "p", "w"):
            if name in fields:
                numbers.setdefault(name, _number(fields[name]))
        key = key or fields.get("k", "")
        unresumable = unresumable or fields.get("x", "")
    if unresumable and not _WORD.fullmatch(unresumable):
        raise ResumeError("the reason of a note cannot be read")
    return Resume(
        events=head.events,
        crc=int(head.crc, 16),
        attempt=head.attempt,
        outputs=outputs,
        logprobs=logprobs,
        created=numbers.get("t"),
        cached_tokens=numbers.get("p"),
        cache_writes=numbers.get("w"),
        key=key,
        unresumable=unresumable,
    )


def _field(word: str) -> tuple[str, str]:
    name, found, value = word.partition("=")
    if not found:
        raise ResumeError("a note has a word without a value")
    return name, value


def _number(text: str) -> int:
    if not text.isdigit() or len(text) > 18:
        raise ResumeError("a number of a note cannot be read")
    return int(text)


def reason_word(reason: str) -> str:
    """``reason`` as it may stand after ``x=``.

    Raises:
        ValueError: it is not one word of small letters and underscores.
    """
    if not _WORD.fullmatch(reason):
        raise ValueError(f"not one word: {reason!r}")
    return reason


FRAME_EVENT: Final = b"event: body\n"


def encode_framed(status: int, headers: Sequence[Header], body: bytes) -> bytes:
    """A whole answer as one event."""
    lines = [FRAME_EVENT, b"status: %d\n" % status]
    lines += [b"header: %b: %b\n" % header for header in headers]
    lines += [b"data: %b\n" % line for line in body.split(b"\n")]
    lines.append(b"\n")
    return b"".join(lines)


def decode_framed(event: bytes) -> tuple[int, list[Header], bytes]:
    """One whole event → status, headers, body.

    Raises:
        ResumeError: it is no framed answer.
    """
    if not event.startswith(FRAME_EVENT) or not event.endswith(b"\n\n"):
        raise ResumeError("it is no framed answer")
    status, headers, data = 0, [], []
    for line in event[len(FRAME_EVENT) : -2].split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"data":
            data.append(value)
        elif name == b"header":
            header, _, said = value.partition(b": ")
            headers.append((header, said))
        elif name == b"status" and value.isdigit() and len(value) == 3:
            status = int(value)
        else:
            raise ResumeError("a line of a framed answer cannot be read")
    if not status:
        raise ResumeError("a framed answer has no status")
    return status, headers, b"\n".join(data)


def crc32(data: bytes, before: int = 0) -> int:
    """The running crc32 of event bytes (the polynomial of zlib and gzip)."""
    return binascii.crc32(data, before)
