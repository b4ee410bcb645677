"""[P] What of an X.509 certificate the gateway wants to know itself: until when it is valid.

The standard library tells that of peers' certificates only. This reads just as much DER (X.690) as RFC 5280 puts before
the field.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18


def not_after(der: bytes) -> float:
    """The end of a certificate's validity in Unix time.

    Raises:
        ValueError: it is not one.
    """
    try:
        certificate, _ = _value(der, 0, _SEQUENCE)
        body, _ = _value(certificate, 0, _SEQUENCE)
        at = _end(body, 0) if body[0] == _VERSION else 0
        for _ in ("serial number", "signature algorithm", "issuer"):
            at = _end(body, at)
        validity, _ = _value(body, at, _SEQUENCE)
        return _time(validity, _end(validity, 0))
    except IndexError:
        raise ValueError("it is cut short") from None


def _end(data: bytes, at: int) -> int:
    return _bounds(data, at)[1]


def _value(data: bytes, at: int, tag: int) -> tuple[bytes, int]:
    if data[at] != tag:
        raise ValueError(f"there is a field of type {data[at]:#x} where one of type {tag:#x} should be")
    start, end = _bounds(data, at)
    return data[start:end], end


def _bounds(data: bytes, at: int) -> tuple[int, int]:
    """Of the content of the element that begins at ``at``."""
    length, start = data[at + 1], at + 2
    if length >= 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[at + 2 : start], "big")
    if start + length > len(data):
        raise IndexError
    return start, start + length


def _time(data: bytes, at: int) -> float:
    start, end = _bounds(data, at)
    text = data[start:end].decode("ascii")
    if data[at] == _UTC_TIME:  # two digits of the year: 1950 to 2049 (RFC 5280, section 4.1.2.5.1)
        text = ("19" if text >= "50" else "20") + text
    elif data[at] != _GENERALIZED_TIME:
        raise ValueError(f"its validity ends with a field of type {data[at]:#x}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
