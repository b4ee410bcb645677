"""[P] Whether what stands behind a range of addresses is what should: read from the kernel's own list of mappings.

A stray munmap or mmap, of any library in the process, would show when the range is used next: as a crash, or as wrong
numbers. The list is ``/proc/self/maps`` (proc(5)), and who may read it is in this process already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

NOTHING: Final = "---p"
READ_ONLY: Final = "r--s"


class Stretch(NamedTuple):
    """``start`` to ``end`` (exclusive), mapped with ``access`` ("r--s") from the file ``inode``; 0: no file."""

    start: int
    end: int
    access: str
    inode: int


def stretches(maps: Iterable[bytes], start: int, end: int) -> list[Stretch]:
    """What is mapped between two addresses, in order, each cut to what lies between them. ``maps`` are the lines."""
    found = []
    for line in maps:
        place, _, rest = line.partition(b" ")
        low, _, high = place.partition(b"-")
        first, last = int(low, 16), int(high, 16)
        if first >= end:
            break
        if last > start:
            fields = rest.split(None, 4)  # access, offset in the file, device, inode, name
            found.append(Stretch(max(first, start), min(last, end), fields[0].decode(), int(fields[3])))
    return found


def fault(found: Sequence[Stretch], wanted: Sequence[Stretch]) -> str | None:
    """What is not as ``wanted``, a sentence; None: all is. ``wanted`` are in order, and may be mapped in parts; what is
    ``found`` between them may be anything."""
    at = iter(found)
    have = next(at, None)
    for want in wanted:
        reached = want.start
        while have is not None and have.end <= reached:
            have = next(at, None)
        while reached < want.end:
            if have is None or have.start > reached:
                return f"nothing is mapped at {reached:#x}"
            if have.access != want.access:
                return f"the mapping at {reached:#x} has the access {have.access}, and should have {want.access}"
            if have.inode != want.inode:
                return f"the mapping at {reached:#x} is of another file than it should be"
            reached = min(have.end, want.end)
            if have.end <= want.end:
                have = next(at, None)
    return None
