"""What the service needs of memory, host or device.

An allocation is made of chunks; a backend knows chunks only. All methods but `share` may take long and are called on
the service's one memory thread, in the order they were asked for, so that pages are never destroyed under a call that
still works on them. `share` is quick and called on the event loop.

After a DeviceError the service ends. Any error other than those below is a mistake: it fails the request that it
happens in, is logged, and the service goes on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from msgspec import Struct

P = TypeVar("P")

NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""What the system says where this process, or the machine, can open no more files: for the moment."""


class OutOfMemoryError(Exception):
    """The machine, not the service's own limit, has no room: for memory, or for descriptors of it. `room_bytes` is the
    largest chunk that it would have had room for, None where nobody knows."""

    def __init__(self, message: str, *, room_bytes: int | None = None) -> None:
        super().__init__(message)
        self.room_bytes = room_bytes


class StillMappedError(Exception):
    """Somebody has a writable mapping of pages that were to be frozen."""


class ForeignPagesError(Exception):
    """A descriptor that was handed back is not the chunk that the journal describes. Says how it differs."""


class DeviceError(Exception):
    """The device failed in a way that the service cannot go on after. One sentence that names the call."""


class Identity(Struct, frozen=True):
    """What a chunk is known by when it is handed back after a restart. Numbers that a backend has no use for are 0."""

    size_bytes: int
    device: int = 0
    inode: int = 0
    seals: int = 0


class Hasher(Protocol):
    """As those of hashlib. Releases the GIL for some KiB and more."""

    def update(self, data: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


Hash = Callable[[], Hasher]
"""A new hasher: `hashlib.sha256` is one."""


class MemoryBackend(Protocol[P]):
    """`P` is the backend's handle for one chunk."""

    @property
    def device_id(self) -> str:
        """What the device is, whatever number it has in a process: see `gms.protocol.Hello`."""
        ...

    @property
    def granularity(self) -> int:
        """Sizes are rounded up to a multiple of this many bytes."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk, a multiple of `granularity`; an allocation's last one may be smaller."""
        ...

    @property
    def slice_bytes(self) -> int:
        """How much to populate or to hash in one call."""
        ...

    @property
    def readable(self) -> bool:
        """Whether `digest` works here; where it does not, clients compute digests and the service compares."""
        ...

    @property
    def descriptors_per_chunk(self) -> int:
        """How many files the service has open for each, at most."""
        ...

    def create(self, tag: str, size_bytes: int) -> P:
        """A chunk, possibly without memory behind it yet. Raises OutOfMemoryError."""
        ...

    def populate(self, pages: P, offset: int, length: int) -> None:
        """Puts memory behind a part, charged to the service. Raises OutOfMemoryError."""
        ...

    def freeze(self, pages: P) -> None:
        """Makes the content final, for everybody and for good, where the device can. Harmless on frozen pages. Raises
        StillMappedError."""
        ...

    def digest(self, pages: P, offset: int, length: int, algorithm: Hash) -> bytes:
        """The digest of a part. Only where `readable`."""
        ...

    def identify(self, pages: P) -> Identity:
        """What `adopt` will compare."""
        ...

    def frozen(self, identity: Identity) -> Identity:
        """What `identify` says of the same chunk once it is frozen."""
        ...

    def adopt(self, fd: int, identity: Identity) -> P:
        """Takes a chunk back that was shared by an earlier service. The caller keeps and closes `fd`. Raises
        ForeignPagesError, OutOfMemoryError."""
        ...

    def share(self, pages: P, *, writable: bool) -> int:
        """A new descriptor for a client; the caller closes it once it is sent. Raises OSError."""
        ...

    def destroy(self, pages: P) -> None:
        """Gives the memory back as soon as no client has it mapped."""
        ...
