"""Which memory a call has got: lists of mappings, and a real one."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.vllm.new_memory import Stretch, anonymous, blocks, new, only_new, word

MAPS = """\
1000-3000 rw-p 00000000 00:00 0
3000-4000 r-xp 00000000 00:00 0
4000-5000 rw-s 00000000 00:01 78                         /memfd:x (deleted)
6000-8000 rw-p 00000000 00:00 0                          [heap]
8000-9000 rw-p 00000000 08:01 12                         /lib/x.so
9000-a000 rw-p 00000000 00:00 0
"""


def test_private_memory_without_a_name_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(MAPS)
    assert anonymous(str(tmp_path / "maps")) == [Stretch(0x1000, 0x3000), Stretch(0x9000, 0xA000)]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([], [(1, 3)], [(1, 3)]),
        ([(1, 3)], [(1, 3)], []),
        ([(1, 3)], [], []),
        ([(3, 5)], [(1, 5)], [(1, 3)]),  # the kernel joins neighbours
        ([(3, 5)], [(3, 7)], [(5, 7)]),
        ([(3, 5), (9, 10)], [(1, 12)], [(1, 3), (5, 9), (10, 12)]),
        ([(1, 9)], [(3, 4)], []),
        ([(1, 2), (4, 6)], [(1, 2), (5, 8), (9, 10)], [(6, 8), (9, 10)]),
    ],
)
def test_new_is_what_was_not_there(
    before: list[tuple[int, int]], after: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    stretches = [[Stretch(*one) for one in lot] for lot in (before, after, found)]
    assert new(stretches[0], stretches[1]) == stretches[2]


def in_order(points: set[int]) -> list[Stretch]:
    ordered = sorted(points)
    return [Stretch(*pair) for pair in zip(ordered[::2], ordered[1::2], strict=False)]


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_new_is_what_sets_of_addresses_say(first: set[int], second: set[int]) -> None:
    before, after = in_order(first), in_order(second)

    def addresses(lot: list[Stretch]) -> set[int]:
        return {address for one in lot for address in range(one.start, one.end)}

    found = new(before, after)
    assert addresses(found) == addresses(after) - addresses(before)
    assert sum(one.end - one.start for one in found) == len(addresses(found))


def test_one_that_fits_is_taken_and_of_several_none() -> None:
    block, small, large = Stretch(0x10000, 0x20000), Stretch(0, 0x1000), Stretch(0x100000, 0x400000)
    assert only_new([], [small, block, large], 0x10000) == block
    assert only_new([], [small, large], 0x10000) is None
    assert only_new([], [block, Stretch(0x30000, 0x40000)], 0x10000) is None


def test_real_memory_is_found() -> None:
    size = 16 << 20
    before = anonymous()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        place = only_new(before, anonymous(), size)
    assert place is not None
    assert place.end - place.start >= size


def saying(**lengths: int) -> dict[int, int]:
    """What the C library has written down: length and flag, by the address of the second word."""
    return {int(name.removeprefix("at_"), 16) + 8: length | 2 for name, length in lengths.items()}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (saying(at_10000=0x8000, at_18000=0x8000), [(0x10000, 0x18000), (0x18000, 0x20000)]),
        (saying(at_10000=0x10000), [(0x10000, 0x20000)]),
        (saying(at_10000=0x8000), [(0x10000, 0x18000), (0x18000, 0x20000)]),  # something else behind it
        ({}, [(0x10000, 0x20000)]),
        (saying(at_10000=0x20000), [(0x10000, 0x20000)]),  # more than there is: no block
        (saying(at_10000=0x8010), [(0x10000, 0x20000)]),  # not of whole pages
        ({0x10008: 0x8001}, [(0x10000, 0x20000)]),  # a block within others
    ],
)
def test_neighbours_that_the_kernel_joined_are_told_apart(words: dict[int, int], found: list[tuple[int, int]]) -> None:
    whole = Stretch(0x10000, 0x20000)
    assert blocks(whole, lambda address: words.get(address, 0)) == [Stretch(*one) for one in found]


def test_a_neighbour_that_came_at_the_same_time_is_not_taken_with_it() -> None:
    words = saying(at_10000=0x8000, at_18000=0x21000)
    got = only_new([], [Stretch(0x10000, 0x39000)], 0x20000, lambda address: words.get(address, 0))
    assert got == Stretch(0x18000, 0x39000)


def test_a_word_that_is_not_there_is_none() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[:8] = (1234).to_bytes(8, "little")
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert word(address) == 1234
    assert word(8) == 0
