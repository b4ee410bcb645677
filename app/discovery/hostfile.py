"""[P] Reads a file of worker addresses: one a line with ``#`` comments, or a JSON list of strings."""

from __future__ import annotations

import json

from app.address import Address, parse_address
from app.discovery.findings import Failed, Finding, Found

MAX_FILE_BYTES = 1 << 20


def read_addresses(content: bytes) -> Finding:
    """An empty JSON list is meant as such; a file without a line may be one that is being written."""
    if len(content) > MAX_FILE_BYTES:
        return Failed(f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Failed("is not text (UTF-8)")
    return _read_json(text) if text.lstrip().startswith("[") and _is_json(text) else _read_lines(text)


def _is_json(text: str) -> bool:
    """Whether the first bracket opens a list and not an IPv6 address."""
    return text.lstrip()[1:].lstrip()[:1] in ('"', "]", "")


def _read_json(text: str) -> Finding:
    try:
        document = json.loads(text)
    except ValueError as error:
        return Failed(f"is no JSON list: {error}")
    found: list[Address] = []
    for item in document:
        if not isinstance(item, str):
            return Failed(f"holds {item!r:.100}; a JSON list of workers holds strings, host:port")
        try:
            found.append(parse_address(item))
        except ValueError as error:
            return Failed(f"has a bad entry: {error}")
    return Found(tuple(found), certain=True)


def _read_lines(text: str) -> Finding:
    found: list[Address] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            found.append(parse_address(entry))
        except ValueError as error:
            return Failed(f"has a bad line {number}: {error}")
    return Found(tuple(found))
