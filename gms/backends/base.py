"""What the service needs of memory, host or device.

`create`, `populate`, `freeze` and `destroy` may take long and are called on the service's one memory thread, in the
order they were asked for, so that pages are never destroyed under a call that still works on them. `share` is quick
and called on the event loop.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

P = TypeVar("P")


class OutOfMemoryError(Exception):
    """The machine, not the service's own limit, has no room."""


class StillMappedError(Exception):
    """Somebody has a writable mapping of pages that were to be frozen."""


class MemoryBackend(Protocol[P]):
    """`P` is the backend's handle for one allocation."""

    @property
    def granularity(self) -> int:
        """Sizes are rounded up to a multiple of this many bytes."""
        ...

    @property
    def slice_bytes(self) -> int:
        """How much to populate in one call."""
        ...

    def create(self, tag: str, size_bytes: int) -> P:
        """An allocation of zeros, possibly without memory behind it yet. Raises OutOfMemoryError."""
        ...

    def populate(self, pages: P, offset: int, length: int) -> None:
        """Puts memory behind a part, charged to the service. Raises OutOfMemoryError."""
        ...

    def freeze(self, pages: P) -> None:
        """Makes the content final, for everybody and for good. Harmless on frozen pages. Raises StillMappedError."""
        ...

    def share(self, pages: P, *, writable: bool) -> int:
        """A new descriptor for a client; the caller closes it once it is sent. Raises OSError."""
        ...

    def destroy(self, pages: P) -> None:
        """Gives the memory back as soon as no client has it mapped."""
        ...
