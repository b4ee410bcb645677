from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from gms.mapping import Backing, Reservation
from gms.protocol import GmsError

PAGE = mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[int]:
    """Four pages, each filled with its number."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    for number in range(4):
        os.pwrite(fd, bytes([number]) * PAGE, number * PAGE)
    yield fd
    os.close(fd)


def protection(address: int) -> str:
    """The permissions of the mapping at an address, from /proc/self/maps."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, rights = line.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return rights
    return ""


def test_the_address_stays_while_the_backing_changes(file: int) -> None:
    with Reservation(4 * PAGE) as range_:
        address = range_.address
        buffer = range_.buffer()
        assert (range_.backing, protection(address)) == (Backing.NONE, "---p")
        range_.map_scratch(PAGE)
        buffer[0] = 42
        assert (range_.backing, buffer[PAGE], buffer[3 * PAGE]) == (Backing.SCRATCH, 42, 42)
        range_.unmap()
        assert protection(address) == "---p"
        range_.map(file, writable=True)
        assert (range_.backing, protection(address)) == (Backing.PAGES_RW, "rw-s")
        assert [buffer[number * PAGE] for number in range(4)] == [0, 1, 2, 3]
        buffer[0] = 9
        range_.map(file, writable=False)
        assert (range_.backing, protection(address), buffer[0]) == (Backing.PAGES_RO, "r--s", 9)
        assert range_.address == address
    assert protection(address) != "r--s"
    assert os.pread(file, 1, 0) == b"\x09"


def test_parts_of_several_files_stand_side_by_side(file: int) -> None:
    with Reservation(4 * PAGE) as range_:
        range_.map(file, writable=False, offset=3 * PAGE)
        range_.map(file, writable=False, offset=PAGE, length=2 * PAGE, at=2 * PAGE)
        buffer = range_.buffer()
        assert [buffer[number * PAGE] for number in (0, 2, 3)] == [3, 1, 2]
        assert protection(range_.address + PAGE) == "---p"
        with pytest.raises(GmsError, match="PAGES_RO; unmap it") as caught:
            range_.map(file, writable=True, length=PAGE)
        assert caught.value.code == "busy"


@pytest.mark.parametrize(
    "arguments",
    [
        {"length": 5 * PAGE},
        {"offset": 4 * PAGE},
        {"offset": 1},
        {"at": 1},
        {"at": -PAGE},
        {"offset": -PAGE},
        {"at": PAGE},
        {"length": 0},
    ],
    ids=str,
)
def test_what_lies_outside_is_refused_before_it_can_be_touched(file: int, arguments: dict[str, int]) -> None:
    with Reservation(4 * PAGE) as range_:
        with pytest.raises(ValueError, match=r"must be multiples|do not fit"):
            range_.map(file, writable=False, **arguments)
        assert range_.backing is Backing.NONE


def test_a_chosen_address_is_taken_or_refused() -> None:
    with Reservation(PAGE) as first:
        address = first.address
        with pytest.raises(FileExistsError):
            Reservation(PAGE, address=address)
    with Reservation(PAGE, address=address) as second:
        assert second.address == address


def test_sizes_are_whole_pages() -> None:
    with Reservation(PAGE + 1) as range_:
        assert range_.size_bytes == 2 * PAGE
        assert len(range_.buffer()) == 2 * PAGE
    with pytest.raises(ValueError, match="positive"):
        Reservation(0)


def test_scratch_of_an_odd_chunk_covers_the_end() -> None:
    with Reservation(5 * PAGE) as range_:
        range_.map_scratch(2 * PAGE)
        range_.buffer()[5 * PAGE - 1] = 1
        assert range_.buffer()[PAGE - 1] == 1
    with Reservation(5 * PAGE) as range_:
        range_.map_scratch(1 << 30)
        range_.buffer()[0] = 1
        assert range_.buffer()[PAGE] == 0


def test_scratch_of_too_many_parts_is_refused() -> None:
    with Reservation(1 << 30) as range_, pytest.raises(ValueError, match="larger chunk"):
        range_.map_scratch(PAGE)


def test_a_large_reservation_costs_nothing() -> None:
    with Reservation(1 << 40) as range_:
        assert len(range_.buffer()) == 1 << 40


def test_a_closed_reservation_says_so_and_close_is_idempotent(file: int) -> None:
    range_ = Reservation(4 * PAGE)
    range_.close()
    range_.close()
    calls = [range_.unmap, range_.buffer, lambda: range_.map_scratch(PAGE), lambda: range_.map(file, writable=False)]
    for call in calls:
        with pytest.raises(GmsError) as caught:
            call()
        assert caught.value.code == "closed"
    assert range_.backing is Backing.NONE


def test_a_read_only_descriptor_cannot_be_mapped_writable(file: int) -> None:
    reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    try:
        with Reservation(4 * PAGE) as range_:
            with pytest.raises(PermissionError, match="mmap"):
                range_.map(reader, writable=True)
            assert range_.backing is Backing.NONE
    finally:
        os.close(reader)
