"""Which stretches of memory get a digest of their own, and what to call one that does not match. Pure.

An allocation is hashed in pieces that begin where its tensors begin, if its manifest is in the standard form: the first
piece that differs then names the tensor. Pieces also end at the ends of chunks, which are separate files, and after
PIECE_BYTES, so that hashing one never takes long.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from gms.manifest import Manifest, Slot
from gms.protocol import MAX_PIECES

PIECE_BYTES: Final = 64 * 1024 * 1024


class Piece(NamedTuple):
    """`length` bytes at `offset` in chunk number `chunk`; `at` is the place in the whole allocation."""

    chunk: int
    offset: int
    length: int
    at: int


def pieces(size_bytes: int, chunk_bytes: int, manifest: bytes, tag: str) -> list[Piece]:
    """The pieces of an allocation in their order, each byte in exactly one. A manifest that would make more than
    MAX_PIECES is not followed, and one piece is never longer than it takes to stay within them either."""
    longest = max(PIECE_BYTES, -(-size_bytes // (MAX_PIECES // 2)))
    starts = {slot.offset for slot in _slots(manifest, tag).values() if 0 < slot.offset < size_bytes}
    plain = set(range(0, size_bytes, chunk_bytes))
    cut = _cut(sorted(plain | starts), size_bytes, chunk_bytes, longest)
    return cut if len(cut) <= MAX_PIECES else _cut(sorted(plain), size_bytes, chunk_bytes, longest)


def name(piece: Piece, manifest: bytes, tag: str) -> str:
    """What lies in a piece, for people: `tensor 'model.norm.weight'`, or the bytes if no manifest says."""
    inside = [
        repr(label)
        for label, slot in _slots(manifest, tag).items()
        if slot.offset < piece.at + piece.length and piece.at < slot.offset + max(slot.size_bytes, 1)
    ]
    if not inside:
        return f"bytes {piece.at} to {piece.at + piece.length} of {tag!r}"
    if len(inside) == 1:
        return f"tensor {inside[0]}"
    more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
    return f"tensors {', '.join(inside[:3])}{more}"


def _slots(manifest: bytes, tag: str) -> dict[str, Slot]:
    try:
        described = Manifest.decode(manifest)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return described.slots() if described.tag == tag else {}


def _cut(starts: list[int], size_bytes: int, chunk_bytes: int, longest: int) -> list[Piece]:
    return [
        Piece(part // chunk_bytes, part % chunk_bytes, min(longest, end - part), part)
        for start, end in zip(starts, [*starts[1:], size_bytes], strict=True)
        for part in range(start, end, longest)
    ]
