"""Whether committed memory is still what was committed: digests kept at the commit, compared whenever it matters.

Where the service can read its device it hashes by itself. A GPU's memory it never maps: there a client hashes what it
has mapped, and what the service compares is the word of that client against the word of the writer.
"""

from __future__ import annotations

import time
from typing import Generic, Protocol, TypeVar

from gms import integrity
from gms.allocations import AllocationTable, Entry
from gms.protocol import Digests, ErrorCode, GmsError
from gms.store import PageStore

P = TypeVar("P")


class Observer(Protocol):
    def hashed(self, size_bytes: int, seconds: float) -> None: ...


class Checker(Generic[P]):
    """Everything here raises GmsError(not_found) if the memory is given back meanwhile."""

    def __init__(self, store: PageStore[P], table: AllocationTable[P], observer: Observer | None) -> None:
        self._store = store
        self._table = table
        self._observer = observer

    @property
    def reads(self) -> bool:
        """Whether the service itself can."""
        return self._store.backend.readable

    async def to_keep(self, entry: Entry[P], manifest: bytes, word: Digests) -> list[bytes]:
        """The digests of an entry that is being committed. Raises GmsError(invalid) if they are due from the writer and
        do not fit."""
        if self.reads:
            return await self._hash(entry, manifest)
        given = word.get(entry.tag, [])
        wanted = len(integrity.pieces(entry.size_bytes, entry.chunk_bytes, manifest, entry.tag))
        if len(given) != wanted:
            raise GmsError(
                ErrorCode.INVALID,
                f"{entry.pool} was not committed: {wanted} digests of {entry.tag!r} are due, {len(given)} came. This "
                "service cannot read its device; the writer must hash what it wrote.",
            )
        return given

    async def fault(self, entry: Entry[P], word: Digests) -> str | None:
        """What is wrong with an entry, by the name of the first tensor; None if it is what was committed. Raises
        GmsError(invalid) if the digests are due from a client and are not all there."""
        manifest = self._table.manifest(entry.pool, entry.generation)
        if self.reads:
            return _difference(entry, await self._hash(entry, manifest), manifest)
        given = word.get(entry.tag, [])
        if len(given) != len(entry.digests):
            raise GmsError(
                ErrorCode.INVALID,
                f"This service cannot read its device: a reader must send its {len(entry.digests)} digests of "
                f"{entry.tag!r}, {len(given)} came.",
            )
        return _difference(entry, given, manifest)

    async def _hash(self, entry: Entry[P], manifest: bytes) -> list[bytes]:
        started = time.monotonic()
        digests = await self._store.digests(entry, manifest)
        if self._observer is not None:
            self._observer.hashed(entry.size_bytes, time.monotonic() - started)
        return digests


def _difference(entry: Entry[P], found: list[bytes], manifest: bytes) -> str | None:
    pieces = integrity.pieces(entry.size_bytes, entry.chunk_bytes, manifest, entry.tag)
    if not len(pieces) == len(entry.digests) == len(found):
        return f"{entry.tag!r} was committed with {len(entry.digests)} digests, {len(found)} were computed now"
    for piece, then, now in zip(pieces, entry.digests, found, strict=True):
        if then != now:
            return f"the content of {integrity.name(piece, manifest, entry.tag)} is not what was committed"
    return None
