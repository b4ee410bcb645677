"""Pieces cover every byte once, begin where tensors begin, and have the tensors' names."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms import integrity
from gms.integrity import PIECE_BYTES, Piece, pieces
from gms.manifest import ALIGNMENT, Manifest, Slot
from gms.protocol import MAX_PIECES

TAG = "weights"


def manifest(*places: tuple[int, int], tag: str = TAG) -> bytes:
    """Tensors "t0", "t1" ... at these offsets, of these sizes in bytes."""
    slots = {
        f"t{number}": Slot(offset=at, size_bytes=size, shape=(size,), stride=(1,), storage_offset=0, dtype="uint8")
        for number, (at, size) in enumerate(places)
    }
    end = max((at + size for at, size in places), default=1)
    return Manifest(tag=tag, size_bytes=end, parameters=slots, buffers={}, aliases={}).encode()


def covers(cut: list[Piece], size_bytes: int, chunk_bytes: int) -> bool:
    """Every byte in exactly one piece, in order, and no piece over the end of a chunk."""
    at = 0
    for piece in cut:
        if piece.at != at or piece.length <= 0 or (piece.chunk, piece.offset) != divmod(at, chunk_bytes):
            return False
        at += piece.length
        if piece.offset + piece.length > chunk_bytes:
            return False
    return at == size_bytes


@given(
    size=st.integers(1, 1 << 41),
    chunk_pages=st.integers(1 << 8, 1 << 20),
    places=st.lists(st.tuples(st.integers(-ALIGNMENT, 1 << 41), st.integers(0, 1 << 32)), max_size=40),
)
@settings(max_examples=300, deadline=None)
def test_every_byte_is_in_one_piece(size: int, chunk_pages: int, places: list[tuple[int, int]]) -> None:
    chunk = max(chunk_pages * ALIGNMENT, -(-size // (MAX_PIECES // 4)))
    cut = pieces(size, chunk, manifest(*places), TAG)
    assert covers(cut, size, chunk)
    assert len(cut) <= MAX_PIECES
    starts = {piece.at for piece in cut}
    assert all(at in starts for at, _ in places if 0 <= at < size)


def test_pieces_begin_with_tensors_and_with_chunks() -> None:
    raw = manifest((0, 100), (2 * ALIGNMENT, 9 * ALIGNMENT))
    assert pieces(12 * ALIGNMENT, 8 * ALIGNMENT, raw, TAG) == [
        Piece(chunk=0, offset=0, length=2 * ALIGNMENT, at=0),
        Piece(chunk=0, offset=2 * ALIGNMENT, length=6 * ALIGNMENT, at=2 * ALIGNMENT),
        Piece(chunk=1, offset=0, length=4 * ALIGNMENT, at=8 * ALIGNMENT),
    ]


def test_a_long_tensor_has_several() -> None:
    cut = pieces(5 * PIECE_BYTES // 2, 1 << 40, manifest((0, 5 * PIECE_BYTES // 2)), TAG)
    assert [piece.length for piece in cut] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]


@pytest.mark.parametrize(
    "raw",
    [b"", b"something else", msgspec.msgpack.encode({"type": "tensors"}), manifest((ALIGNMENT, 5), tag="other")],
    ids=["none", "foreign", "half", "of another allocation"],
)
def test_without_a_manifest_of_this_allocation_only_the_size_counts(raw: bytes) -> None:
    cut = pieces(2 * ALIGNMENT, 1 << 40, raw, TAG)
    assert cut == [Piece(0, 0, 2 * ALIGNMENT, 0)]
    assert integrity.name(cut[0], raw, TAG) == f"bytes 0 to {2 * ALIGNMENT} of 'weights'"


def test_a_manifest_of_too_many_tensors_is_not_followed() -> None:
    at_most = manifest(*((number * 8, 8) for number in range(MAX_PIECES)))
    assert len(pieces(8 * MAX_PIECES, 1 << 40, at_most, TAG)) == MAX_PIECES
    too_many = manifest(*((number * 8, 8) for number in range(MAX_PIECES + 1)))
    assert pieces(8 * MAX_PIECES + 8, 1 << 40, too_many, TAG) == [Piece(0, 0, 8 * MAX_PIECES + 8, 0)]


def test_the_largest_allocation_has_few_enough_pieces() -> None:
    size = 1 << 48
    cut = pieces(size, 1 << 48, b"", TAG)
    assert covers(cut, size, 1 << 48)
    assert len(cut) <= MAX_PIECES


def test_what_lies_in_a_piece_is_named() -> None:
    raw = manifest((0, ALIGNMENT), (ALIGNMENT, 10), (2 * ALIGNMENT, 0), (3 * ALIGNMENT, 2 * PIECE_BYTES))
    size = 3 * ALIGNMENT + 2 * PIECE_BYTES
    names = [integrity.name(piece, raw, TAG) for piece in pieces(size, 1 << 40, raw, TAG)]
    assert names == ["tensor 't0'", "tensor 't1'", "tensor 't2'", "tensor 't3'", "tensor 't3'"]


def test_tensors_of_one_storage_are_named_together_but_not_without_end() -> None:
    raw = manifest(*[(0, ALIGNMENT)] * 50)
    (piece,) = pieces(ALIGNMENT, 1 << 40, raw, TAG)
    assert integrity.name(piece, raw, TAG) == "tensors 't0', 't1', 't2' and 47 more"


def test_bytes_between_tensors_have_no_tensors_name() -> None:
    raw = manifest((0, 10))
    assert (
        integrity.name(Piece(0, ALIGNMENT, 10, ALIGNMENT), raw, TAG)
        == f"bytes {ALIGNMENT} to {ALIGNMENT + 10} of 'weights'"
    )
