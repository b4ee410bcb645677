"""[P] Bodies that a client has compressed: gzip, zstd and deflate, one at a time, never more than the limit.

A small body can stand for one that fills the memory, so output is taken in pieces, and the limit is looked at after
each. Decoding takes steps, so that whoever runs it can leave the event loop when a body turns out to be large, and can
be stopped between two of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

from app.openai.errors import Header, body_too_large, invalid_encoding, unsupported_encoding

CODINGS: Final = ("gzip", "zstd", "deflate")
_PIECE_BYTES: Final = 64 * 1024
MAX_PARTS: Final = 64
"""Members of gzip or frames of zstd in one body. One is usual; many that stand for nothing would cost minutes."""
_STEP_BYTES: Final = 4 * 1024
"""What a piece costs beside its bytes: there are bodies of many parts that stand for nothing."""
_ZSTD: Final[dict[int, int]] = {DecompressionParameter.window_log_max: 23}
"""RFC 9659: a window of 8 MiB is what a decoder must have, and all it need have."""
_ABOUT_THE_CODED: Final = frozenset((b"content-encoding", b"content-md5", b"content-digest", b"digest", b"repr-digest"))


def coding_of(value: bytes) -> str:
    """The coding that a ``content-encoding`` names; empty if none.

    Raises:
        GatewayError: 415, for one that is unknown here, and for several.
    """
    name = value.strip().lower().decode("latin-1")
    if name in ("", "identity"):
        return ""
    name = "gzip" if name == "x-gzip" else name
    if name not in CODINGS:
        raise unsupported_encoding(value.decode("latin-1"), CODINGS)
    return name


def without_coding(headers: list[Header]) -> list[Header]:
    """The headers of the decoded body."""
    return [header for header in headers if header[0] not in _ABOUT_THE_CODED]


class Decoding:
    """One body; call :meth:`run` until it says that :attr:`body` is whole."""

    def __init__(self, coding: str, coded: bytes, limit_bytes: int) -> None:
        self._coding = coding
        self._limit = limit_bytes
        self._pieces = _unzstd(coded) if coding == "zstd" else _inflate(coded, 31 if coding == "gzip" else 15)
        self._parts: list[bytes] = []
        self._size = 0
        self._stopped = False

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def stop(self) -> None:
        """Have :meth:`run`, in whatever thread, return soon. The body will never be whole."""
        self._stopped = True

    def run(self, budget_bytes: int) -> bool:
        """Go on until about so many bytes came out, or to the end: then it returns ``True``.

        Raises:
            GatewayError: 413 if the body is over the limit, 400 if these bytes were not made by this coding.
        """
        try:
            for piece in self._pieces:
                self._size += len(piece)
                if self._size > self._limit:
                    raise body_too_large(self._limit)
                if piece:
                    self._parts.append(piece)
                budget_bytes -= len(piece) + _STEP_BYTES
                if budget_bytes <= 0 or self._stopped:
                    return False
        except EOFError:
            raise invalid_encoding(self._coding, "it ends too early") from None
        except _TooManyParts:
            raise invalid_encoding(self._coding, f"it has more than {MAX_PARTS} members or frames") from None
        except (zlib.error, ZstdError):
            raise invalid_encoding(self._coding, "it is damaged, or something else") from None
        return True


class _TooManyParts(Exception):
    """More than :data:`MAX_PARTS`."""


def _slices(coded: bytes) -> Iterator[memoryview]:
    whole = memoryview(coded)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def _inflate(coded: bytes, window_bits: int) -> Iterator[bytes]:
    """gzip may have several members, one after the other; they are one body."""
    inflater = zlib.decompressobj(window_bits)
    parts = 1
    for part in _slices(coded):
        rest: bytes | memoryview = part
        while rest:
            if inflater.eof:
                parts += 1
                if parts > MAX_PARTS:
                    raise _TooManyParts
                inflater = zlib.decompressobj(window_bits)
            yield inflater.decompress(rest, _PIECE_BYTES)
            rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    while not inflater.eof:
        piece = inflater.decompress(b"", _PIECE_BYTES)
        if not piece and not inflater.eof:
            raise EOFError
        yield piece


def _unzstd(coded: bytes) -> Iterator[bytes]:
    """Frame after frame."""
    frame = ZstdDecompressor(options=_ZSTD)
    parts = 1
    for part in _slices(coded):
        rest: bytes | memoryview = part
        while rest:
            if frame.eof:
                parts += 1
                if parts > MAX_PARTS:
                    raise _TooManyParts
                frame = ZstdDecompressor(options=_ZSTD)
            yield frame.decompress(rest, _PIECE_BYTES)
            while not (frame.eof or frame.needs_input):
                yield frame.decompress(b"", _PIECE_BYTES)
            rest = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError
