"""Memory of the host beside a device's, in the same pools: for what belongs to a pool's pages and is read by a CPU.

Whoever asks for an allocation says so by its tag (`gms.protocol.HOST_TAG`). It is leased, handed on and handed back as
all of its pool is. What the device cannot do, such as reading, is not done for it either.
"""

from __future__ import annotations

from typing import Any, Final

from gms.backends.base import Hash, Identity, MemoryBackend
from gms.backends.host import HostBackend, HostPages
from gms.protocol import HOST_TAG


class BesideHost:
    """A MemoryBackend over a device's, which says all that is asked of a backend as a whole."""

    def __init__(self, device: MemoryBackend[Any]) -> None:
        self._device: Final = device
        self._host: Final = HostBackend(device.device_id)
        self.device_id: Final = device.device_id
        self.granularity: Final = device.granularity
        self.chunk_bytes: Final = device.chunk_bytes
        self.slice_bytes: Final = device.slice_bytes
        self.readable: Final = device.readable
        self.descriptors_per_chunk: Final = device.descriptors_per_chunk

    def create(self, tag: str, size_bytes: int) -> Any:
        return (self._host if tag.startswith(HOST_TAG) else self._device).create(tag, size_bytes)

    def populate(self, pages: Any, offset: int, length: int) -> None:
        self._of(pages).populate(pages, offset, length)

    def freeze(self, pages: Any) -> None:
        self._of(pages).freeze(pages)

    def digest(self, pages: Any, offset: int, length: int, algorithm: Hash) -> bytes:
        return self._of(pages).digest(pages, offset, length, algorithm)

    def identify(self, pages: Any) -> Identity:
        return self._of(pages).identify(pages)

    def frozen(self, identity: Identity) -> Identity:
        return self._known_by(identity).frozen(identity)

    def adopt(self, fd: int, identity: Identity) -> Any:
        return self._known_by(identity).adopt(fd, identity)

    def share(self, pages: Any, *, writable: bool) -> int:
        return self._of(pages).share(pages, writable=writable)

    def destroy(self, pages: Any) -> None:
        self._of(pages).destroy(pages)

    def _of(self, pages: Any) -> MemoryBackend[Any]:
        return self._host if isinstance(pages, HostPages) else self._device

    def _known_by(self, identity: Identity) -> MemoryBackend[Any]:
        """A chunk of the host is known by its file, one of a GPU is none."""
        return self._host if identity.inode else self._device
