"""Which memory a call has got, seen from the process's own list of mappings. Linux and glibc."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

_MAPS: Final = "/proc/self/maps"
_MEMORY: Final = "/proc/self/mem"
_PAGE: Final = 4096
_WORD: Final = 8
_IS_MMAPPED: Final = 2
_FLAGS: Final = 7
"""glibc, malloc.c, ``struct malloc_chunk``: the second word of a block is its length, and flags in its last three bits;
a block with a mapping of its own has this one, and its length is the mapping's."""


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


def blocks(stretch: Stretch, word_at: Callable[[int], int]) -> list[Stretch]:
    """The mappings of single blocks that the kernel shows as one, since they lie side by side: each says its length.

    ``word_at``: the word at an address, or 0 if it cannot be read. What begins with something else stays whole.
    """
    found: list[Stretch] = []
    start = stretch.start
    while start < stretch.end:
        said = word_at(start + _WORD)
        length = said & ~_FLAGS if said & _IS_MMAPPED else 0
        if not length or length % _PAGE or start + length > stretch.end:
            length = stretch.end - start
        found.append(Stretch(start, start + length))
        start += length
    return found


def word(address: int) -> int:
    """A word of this process's memory, which another thread may take away meanwhile; 0: there is nothing."""
    memory = os.open(_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int.from_bytes(os.pread(memory, _WORD, address), "little")
    except OSError:
        return 0
    finally:
        os.close(memory)


def only_new(
    before: list[Stretch], after: list[Stretch], size_bytes: int, word_at: Callable[[int], int] = word
) -> Stretch | None:
    """The one new mapping that can hold a block of so many bytes and little more; None: there is none, or several.

    Packed matrices are padded in both directions to what a kernel takes at a time, so that small ones may double.
    """
    found = [one for stretch in new(before, after) for one in blocks(stretch, word_at)]
    fitting = [one for one in found if size_bytes <= one.end - one.start <= 2 * size_bytes + 16 * _PAGE]
    return fitting[0] if len(fitting) == 1 else None
