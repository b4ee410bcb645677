"""GPU memory: one driver handle a chunk, and one descriptor exported from it.

Nothing is ever mapped here and no context is made: no kernel can kill the service, and it takes no memory of the GPU
for itself. So it cannot read what clients wrote either: digests are theirs, and a chunk that is handed back after a
restart is taken on the client's word, once the driver has said that it is memory of a GPU at all. Nothing can be
sealed: that a reader does not map its pages writable is held by our client, not by the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from gms.backends.base import NO_DESCRIPTORS, ForeignPagesError, Hash, Identity, OutOfMemoryError
from gms.backends.cuda_calls import FOREIGN, CudaError, Driver

CHUNK_BYTES: Final = 512 * 1024 * 1024
"""Some hundred calls for a large GPU. With chunks of 2 MiB mapping one takes seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaPages:
    """`handle` is None for a chunk that was handed back: its descriptor keeps the memory."""

    handle: int | None
    fd: int
    size_bytes: int


class CudaBackend:
    """A MemoryBackend over the GPU that this process calls `ordinal`, in chunks of `chunk_bytes`.

    Raises DeviceError if there is no such GPU or it cannot share memory, ValueError for chunks that are no multiple of
    its granularity (2 MiB on all GPUs so far).
    """

    readable: Final = False
    descriptors_per_chunk: Final = 2  # the exported one, and what the driver may keep open for the handle

    def __init__(self, ordinal: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver: Final = Driver()
        self._ordinal: Final = ordinal
        self._driver.check_sharing(ordinal)
        self.device_id: Final = self._driver.uuid(ordinal)
        self.granularity: Final = self._driver.granularity(ordinal)
        if chunk_bytes <= 0 or chunk_bytes % self.granularity:
            raise ValueError(f"chunks must be a multiple of {self.granularity} bytes, not {chunk_bytes}")
        self.chunk_bytes: Final = chunk_bytes
        self.slice_bytes: Final = chunk_bytes

    def create(self, tag: str, size_bytes: int) -> CudaPages:
        handle = self._driver.create(self._ordinal, size_bytes)
        try:
            fd = self._driver.export(handle)
        except BaseException:
            self._driver.release(handle)
            raise
        return CudaPages(handle, fd, size_bytes)

    def populate(self, pages: CudaPages, offset: int, length: int) -> None:
        """Nothing to do: memory of a GPU is there once it is created."""

    def freeze(self, pages: CudaPages) -> None:
        """Nothing to do: memory of a GPU cannot be sealed."""

    def digest(self, pages: CudaPages, offset: int, length: int, algorithm: Hash) -> bytes:
        raise NotImplementedError("the service maps no memory of a GPU; clients compute digests")

    def identify(self, pages: CudaPages) -> Identity:
        return Identity(size_bytes=pages.size_bytes)

    def frozen(self, identity: Identity) -> Identity:
        return identity

    def adopt(self, fd: int, identity: Identity) -> CudaPages:
        """Lets the driver open the descriptor once, to learn whether it is memory of a GPU. Its size shows only when a
        client maps it."""
        try:
            handle = self._driver.open(fd)
        except CudaError as error:
            if error.number not in FOREIGN:
                raise
            raise ForeignPagesError(f"the driver does not take it as memory of a GPU ({error})") from error
        self._driver.release(handle)
        try:
            return CudaPages(None, os.dup(fd), identity.size_bytes)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            raise OutOfMemoryError(f"its descriptor cannot be kept: {error.strerror}") from error

    def share(self, pages: CudaPages, *, writable: bool) -> int:
        return os.dup(pages.fd)

    def destroy(self, pages: CudaPages) -> None:
        try:
            if pages.handle is not None:
                self._driver.release(pages.handle)
        finally:
            os.close(pages.fd)
