"""[P] Logprobs of generated tokens as one word of a note, exactly.

vLLM keeps, for each token, a dictionary from token to logprob: the sampled one first, then the most likely ones in
order. As bytes (little endian): how many (u16), the rank of the sampled one (u32), ids (u32 each), logprobs (float32
each, which is what the sampler gave); an output's tokens one after the other, in URL-safe base64 without padding.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_HEAD = struct.Struct("<HI")


class Position(NamedTuple):
    """The logprobs of one token as the sampler gives them: the sampled one, then the most likely ones, in which it may
    be a second time."""

    ids: list[int]
    logprobs: list[float]
    rank: int


def pack(positions: Iterable[Mapping[int, Any]]) -> str:
    """vLLM's dictionaries → the text."""
    parts = []
    for position in positions:
        ids = list(position)
        values = list(position.values())
        parts.append(_HEAD.pack(len(ids), values[0].rank))
        parts.append(struct.pack(f"<{len(ids)}I{len(ids)}f", *ids, *[value.logprob for value in values]))
    return urlsafe_b64encode(b"".join(parts)).rstrip(b"=").decode()


def unpack(text: str, top: int) -> list[Position]:
    """The inverse, for a request that asked for the ``top`` most likely ones.

    Raises:
        ValueError: it is none.
    """
    try:
        raw = b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(f"the logprobs of a note cannot be read: {error}") from None
    found, at = [], 0
    while at < len(raw):
        try:
            count, rank = _HEAD.unpack_from(raw, at)
            values = struct.unpack_from(f"<{count}I{count}f", raw, at + _HEAD.size)
        except struct.error as error:
            raise ValueError(f"the logprobs of a note cannot be read: {error}") from None
        at += _HEAD.size + 8 * count
        found.append(_position(list(values[:count]), list(values[count:]), rank, top))
    return found


def _position(ids: list[int], logprobs: list[float], rank: int, top: int) -> Position:
    """A dictionary holds the sampled token once: if it is one of the most likely, it goes back to its place there."""
    if len(ids) not in (top, top + 1) or not rank:
        raise ValueError(f"a note has {len(ids)} logprobs of a token, where {top} were asked for")
    if len(ids) == top:
        if rank > top:
            raise ValueError(f"a note has a token of rank {rank} among the {top} most likely")
        ids.insert(rank, ids[0])
        logprobs.insert(rank, logprobs[0])
    return Position(ids, logprobs, rank)
