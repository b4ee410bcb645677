"""Chunks as they travel: nothing twice, nothing left out, never more than a message takes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms.pages import Allocation, check_chunks, chunk_count, hand_back_messages
from gms.protocol import MAX_FDS, MAX_PARTS, GmsError, Pages


@pytest.fixture
def fds() -> list[int]:
    return [os.memfd_create("page") for _ in range(3)]


def test_chunks_have_their_sizes_and_the_last_one_the_rest(fds: list[int]) -> None:
    with Allocation("w", 10 * 4096, 4 * 4096, fds, created=True) as pages:
        assert [chunk.size_bytes for chunk in pages.chunks] == [4 * 4096, 4 * 4096, 2 * 4096]
        assert [chunk.fd for chunk in pages.chunks] == fds
        with pytest.raises(GmsError, match="3 chunks"):
            _ = pages.fd


def test_a_closed_allocation_says_so_and_its_descriptors_are_gone(fds: list[int]) -> None:
    pages = Allocation("w", 3 * 4096, 4096, fds, created=True)
    pages.close()
    pages.close()
    with pytest.raises(GmsError, match="closed by their owner"):
        _ = pages.chunks
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=100))
def test_hand_back_messages_hold_every_chunk_once_in_order(counts: list[int]) -> None:
    """Numbers stand for descriptors: nothing is opened or closed here."""
    numbers = iter(range(1_000_000, 2_000_000))
    made = [[next(numbers) for _ in range(count)] for count in counts]
    allocations = [
        Allocation(f"tag{index}", len(fds) * 4096, 4096, fds, created=False) for index, fds in enumerate(made)
    ]
    seen: dict[str, list[int]] = {}
    for parts, fds in hand_back_messages(allocations):
        assert 1 <= len(parts) <= MAX_PARTS
        assert sum(part.count for part in parts) == len(fds) <= MAX_FDS
        rest = list(fds)
        for part in parts:
            known = seen.setdefault(part.tag, [])
            assert part.first == len(known)
            known += rest[: part.count]
            del rest[: part.count]
    assert list(seen.values()) == made


def pages(size_bytes: int, chunk_bytes: int, first: int = 0) -> Pages:
    return Pages(tag="w", size_bytes=size_bytes, chunk_bytes=chunk_bytes, created=False, first=first)


@pytest.mark.parametrize(
    ("reply", "first", "received"),
    [
        (pages(4096, 4096), 0, 1),
        (pages(10, 4), 0, 3),
        (pages(10, 4), 0, 1),
        (pages(10, 4, first=2), 2, 1),
        (pages(100 * 4096, 4096), 0, MAX_FDS),
    ],
)
def test_chunks_that_are_due_are_taken(reply: Pages, first: int, received: int) -> None:
    check_chunks(reply, first, received)


@pytest.mark.parametrize(
    ("reply", "first", "received"),
    [
        (pages(4096, 4096), 0, 0),
        (pages(4096, 4096), 0, 2),
        (pages(10, 4, first=2), 2, 2),
        (pages(10, 4, first=1), 2, 1),
        (pages(10, 4, first=3), 3, 1),
        (pages(10, 0), 0, 1),
        (pages(0, 4), 0, 1),
    ],
)
def test_chunks_that_are_not_due_are_refused(reply: Pages, first: int, received: int) -> None:
    with pytest.raises(GmsError):
        check_chunks(reply, first, received)


def test_the_number_of_chunks_is_rounded_up() -> None:
    assert [chunk_count(pages(size, 4)) for size in (1, 4, 5, 8)] == [1, 1, 2, 2]
