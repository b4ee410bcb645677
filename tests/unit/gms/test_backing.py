from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from gms import libc
from gms.backing import NOTHING, READ_ONLY, Stretch, fault, stretches
from gms.devices import Chunk
from gms.mapping import Reservation

MAPS = b"""\
1000-3000 r--s 00000000 00:01 77                         /memfd:gms:weights/abc (deleted)
3000-4000 r--s 00000000 00:01 78                         /memfd:gms:weights/abc (deleted)
4000-6000 ---p 00000000 00:00 0
8000-9000 rw-p 00000000 00:00 0                          [heap]
""".splitlines()
WANTED = [Stretch(0x1000, 0x3000, READ_ONLY, 77), Stretch(0x3000, 0x4000, READ_ONLY, 78)]


def test_only_what_lies_between_is_read_and_cut_to_it() -> None:
    assert stretches(MAPS, 0x2000, 0x5000) == [
        Stretch(0x2000, 0x3000, "r--s", 77),
        Stretch(0x3000, 0x4000, "r--s", 78),
        Stretch(0x4000, 0x5000, "---p", 0),
    ]
    assert stretches(MAPS, 0x6000, 0x8000) == []


def test_what_is_as_it_should_be_has_no_fault_in_however_many_parts() -> None:
    assert fault(stretches(MAPS, 0x1000, 0x4000), WANTED) is None
    assert fault([Stretch(0x1000, 0x2000, READ_ONLY, 77), Stretch(0x2000, 0x3000, READ_ONLY, 77)], WANTED[:1]) is None
    between = Stretch(0x3000, 0x5000, "rw-p", 0)
    apart = [WANTED[0], Stretch(0x5000, 0x6000, READ_ONLY, 78)]
    assert fault([Stretch(0, 0x1000, "rw-p", 0), WANTED[0], between, *apart[1:]], apart) is None
    assert fault([Stretch(0x4000, 0x6000, NOTHING, 0)], [Stretch(0x4000, 0x5000, NOTHING, 0)]) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "nothing is mapped at 0x1000"),
        ([WANTED[0]], "nothing is mapped at 0x3000"),
        ([Stretch(0x2000, 0x3000, READ_ONLY, 77), WANTED[1]], "nothing is mapped at 0x1000"),
        ([WANTED[0], Stretch(0x3000, 0x4000, "rw-p", 78)], "0x3000 has the access rw-p, and should have r--s"),
        ([WANTED[0], Stretch(0x3000, 0x4000, READ_ONLY, 9)], "0x3000 is of another file than it should be"),
        ([WANTED[0], Stretch(0x3000, 0x3800, READ_ONLY, 78)], "nothing is mapped at 0x3800"),
    ],
)
def test_what_is_not_is_said(found: list[Stretch], said: str) -> None:
    problem = fault(found, WANTED)
    assert problem is not None
    assert said in problem


@pytest.fixture
def chunk() -> Iterator[Chunk]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    yield Chunk(fd, 4 * mmap.PAGESIZE)
    os.close(fd)


def test_a_range_of_this_process(chunk: Chunk) -> None:
    with Reservation(8 * mmap.PAGESIZE) as place:
        assert place.fault() is None
        assert place.fault([chunk]) is not None
        place.map([chunk], writable=False)
        assert place.fault([chunk]) is None
        assert place.fault() is not None
        stray = place.address + mmap.PAGESIZE
        libc.mmap(stray, mmap.PAGESIZE, libc.PROT_READ, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED)
        problem = place.fault([chunk])
        assert problem is not None
        assert f"{stray:#x}" in problem
        assert ctypes.string_at(stray, 1) == b"\0"  # it would have been read as if nothing were wrong
