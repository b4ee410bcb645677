"""Weights compared with what was committed, a part at a time and round and round: all of them at once would take long.

The digests are the memory service's, of the commit. What is hashed is what this engine has mapped, so that a mapping of
something else shows as well as memory that has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from gms import integrity
from gms.backends.base import Hasher
from gms.client import Allocation
from gms.mapping import Hash, Reservation

ALGORITHMS: Final[dict[str, Hash]] = {"xxh3_128": xxhash.xxh3_128}
"""By the names that the memory service gives them."""
ALGORITHM: Final = "xxh3_128"
"""What a memory service compares, so what a writer of weights that it cannot read has to give it."""
CHECK_SECONDS: Final = 0.02
"""What one self-test may spend on it."""
SLICE_BYTES: Final = 4 * 1024 * 1024
"""Hashed in one go: half a millisecond."""


class Rotation:
    """Compares one allocation that is mapped at `place`, from its first piece to its last and then again."""

    def __init__(
        self, place: Reservation, pages: Allocation, manifest: bytes, digests: Sequence[bytes], algorithm: Hash
    ) -> None:
        """Raises ValueError: these are not the digests of this allocation."""
        self._place = place
        self._tag = pages.tag
        self._manifest = manifest
        self._algorithm = algorithm
        self._digests = tuple(digests)
        self._pieces = integrity.pieces(pages.size_bytes, pages.chunk_bytes, manifest, pages.tag)
        if len(self._pieces) != len(self._digests):
            raise ValueError(f"{len(self._pieces)} pieces and {len(self._digests)} digests")
        self._piece = 0
        self._done = 0
        self._hasher: Hasher | None = None
        self.rounds = 0
        """How often everything has been compared."""

    def advance(self, *, enough: Callable[[], bool]) -> str | None:
        """Go on where the last call stopped, until `enough` or the round is over. What does not match, a sentence."""
        rounds = self.rounds
        while self.rounds == rounds:
            if (problem := self._slice()) is not None or enough():
                return problem
        return None

    def _slice(self) -> str | None:
        piece = self._pieces[self._piece]
        if self._hasher is None:
            self._hasher, self._done = self._algorithm(), 0
        hasher, length = self._hasher, min(SLICE_BYTES, piece.length - self._done)
        digest = self._place.digest(piece.at + self._done, length, lambda: hasher)
        self._done += length
        if self._done < piece.length:
            return None
        self._hasher = None
        wanted = self._digests[self._piece]
        self._piece = (self._piece + 1) % len(self._pieces)
        self.rounds += self._piece == 0
        if digest == wanted:
            return None
        return f"the content of {integrity.name(piece, self._manifest, self._tag)} is not what was committed"
