"""[P] Looking into the headers of a message, whoever sent it: pairs of bytes, names in lower case."""

from __future__ import annotations

from collections.abc import Iterable


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header."""
    for key, value in headers:
        if key == name:
            return value
    return None
