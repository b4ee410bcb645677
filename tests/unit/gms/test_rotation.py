from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import xxhash

from gms.client import Allocation
from gms.mapping import Reservation
from gms.rotation import ALGORITHMS, SLICE_BYTES, Rotation

SIZE = 3 * SLICE_BYTES
CHUNK = 2 * SLICE_BYTES
PAGES = cast(Allocation, SimpleNamespace(tag="w", size_bytes=SIZE, chunk_bytes=CHUNK))


class Committed:
    """Memory whose digests are known."""

    def __init__(self, place: Reservation) -> None:
        self.place = place
        place.map_scratch(SIZE)
        place.write(SLICE_BYTES, b"content")
        content = place.read(0, SIZE)
        self.digests = [xxhash.xxh3_128(content[at : at + CHUNK]).digest() for at in range(0, SIZE, CHUNK)]

    def rotation(self) -> Rotation:
        return Rotation(self.place, PAGES, b"", self.digests, ALGORITHMS["xxh3_128"])


def test_a_round_goes_over_everything_once() -> None:
    with Reservation(SIZE) as place:
        rotation = Committed(place).rotation()
        assert rotation.advance(enough=lambda: False) is None
        assert rotation.rounds == 1


def test_a_byte_that_changed_is_found_within_a_round_whatever_the_steps() -> None:
    with Reservation(SIZE) as place:
        committed = Committed(place)
        for at in (0, CHUNK - 1, SIZE - 1):
            rotation = committed.rotation()
            was = place.read(at, 1)
            place.write(at, b"\xff")
            said = [rotation.advance(enough=lambda: True) for _ in range(SIZE // SLICE_BYTES)]
            place.write(at, was)
            assert sum(problem is not None for problem in said) == 1
            problem = next(problem for problem in said if problem)
            assert f"bytes {at // CHUNK * CHUNK} to" in problem
        assert committed.rotation().advance(enough=lambda: False) is None


def test_digests_of_something_else_are_refused() -> None:
    with Reservation(SIZE) as place:
        committed = Committed(place)
        with pytest.raises(ValueError, match="2 pieces and 1 digests"):
            Rotation(place, PAGES, b"", committed.digests[:1], ALGORITHMS["xxh3_128"])
