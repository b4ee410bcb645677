"""What the generator tells of each request, in files that whoever judges it reads along.

Files, since a generator that waits for a full pipe would be late with everything. One grows to ``FILE_BYTES``, then
the next one begins, and the reader removes those that it has done with: a run of days takes no more room than one of
minutes. A record is its length (u32, little-endian) and a msgpack document.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

FILE_BYTES: Final = 8 << 20
MAX_RECORD_BYTES: Final = 256 << 20
_LENGTH: Final = struct.Struct("<I")


class Began(msgspec.Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The schedule's second 0, by ``time.monotonic()``."""

    at: float


class Answered(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    """One request and its answer as it came. ``sent_at`` and ``done_at`` are unix seconds, other times durations."""

    number: int
    phase: int
    late: float
    """By how much the generator sent it after it was due."""
    sent_at: float = 0.0
    done_at: float = 0.0
    total: float = 0.0
    first: float | None = None
    """Time to the first token, of a stream."""
    gaps: bytes = b""
    """Between reads that brought tokens: an array of 32-bit floats."""
    tokens: int = 0
    status: int = 0
    retry_after: bool = False
    broken: str = ""
    left: bool = False
    body: bytes = b""
    said: list[str] = []
    """A realtime session's answers."""


class Ended(msgspec.Struct, frozen=True, tag=True, kw_only=True, array_like=True):
    """The last record. ``unsent`` were not sent because too many were out."""

    sent: int
    unsent: int
    most_outstanding: int
    seconds: float
    processor_seconds: float


Record = Began | Answered | Ended


class RecordWriter:
    """Each record is in the file when ``write`` returns."""

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._fd = self._open()
        self._written = 0

    def write(self, record: Record) -> None:
        raw = self._encoder.encode(record)
        if self._written >= self._file_bytes:
            following = self._number + 1
            os.close(self._fd)
            self._number, self._fd, self._written = following, -1, 0
            self._fd = self._open()
        data = memoryview(_LENGTH.pack(len(raw)) + raw)
        while data:
            done = os.write(self._fd, data)
            self._written += done
            data = data[done:]

    def close(self) -> None:
        """Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(_path(self._folder, self._number), flags, 0o600)


class RecordReader:
    """Reads behind a writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Began | Answered | Ended)
        self._number = 0
        self._at = 0

    def read(self) -> list[Record]:
        """The whole records that were written since the last call, a file's worth at most; none: there are no more now.

        Raises:
            ValueError: what is there is no record.
        """
        path = _path(self._folder, self._number)
        over = _path(self._folder, self._number + 1).exists()  # asked first: then what is in this one is all of it
        try:
            with path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        found, at = [], 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_RECORD_BYTES:
                raise ValueError(f"a record of {length} bytes in {path.name}")
            if len(data) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            found.append(self._decoder.decode(data[at : at + length]))
            at += length
        self._at += at
        if over and at == len(data):
            path.unlink()
            self._number, self._at = self._number + 1, 0
            return found or self.read()
        return found


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.records"
