"""Which memory a call has got, seen from the process's own list of mappings. Linux and glibc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

_MAPS: Final = "/proc/self/maps"
_PAGE: Final = 4096


class Stretch(NamedTuple):
    """Addresses from ``start`` up to ``end``."""

    start: int
    end: int


def anonymous(path: str = _MAPS) -> list[Stretch]:
    """Private memory without a file and without a name, writable and not executable, in order."""
    with open(path) as lines:
        return list(_parsed(lines))


def _parsed(lines: Iterable[str]) -> Iterator[Stretch]:
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 5 and fields[1] == "rw-p" and fields[4] == "0":
            start, _, end = fields[0].partition("-")
            yield Stretch(int(start, 16), int(end, 16))


def new(before: list[Stretch], after: list[Stretch]) -> list[Stretch]:
    """What ``after`` has and ``before`` has not. Both in order, neither overlaps with itself."""
    found: list[Stretch] = []
    old = iter(before)
    current = next(old, None)
    for start, end in after:
        while start < end:
            while current is not None and current.end <= start:
                current = next(old, None)
            if current is None or current.start >= end:
                found.append(Stretch(start, end))
                break
            if current.start > start:
                found.append(Stretch(start, current.start))
            start = current.end
    return found


def only_new(before: list[Stretch], after: list[Stretch], size_bytes: int) -> Stretch | None:
    """The one new stretch that can hold a block of so many bytes and little more; None: there is none, or several.

    Packed matrices are padded in both directions to what a kernel takes at a time, so that small ones may double.
    """
    fitting = [one for one in new(before, after) if size_bytes <= one.end - one.start <= 2 * size_bytes + 16 * _PAGE]
    return fitting[0] if len(fitting) == 1 else None
