"""How a client maps the memory of a GPU: whole handles over reserved addresses, through the driver's VMM calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gms.backends.base import Hash, OutOfMemoryError
from gms.backends.cuda_calls import FOREIGN, CudaError, Driver
from gms.devices import DLPACK_CUDA, Chunk, address_taken
from gms.protocol import ErrorCode, GmsError

CONTEXT_BYTES: Final = 500 * 1024 * 1024
"""About what a context takes of a large GPU; for a sentence only."""


class CudaMemory:
    """A DeviceMemory over the GPU that this process calls `ordinal`. Raises DeviceError if there is none.

    Mapping needs no context. Reading, writing and digests do: the device's primary one, torch's as well, is made when
    it is first needed, and then kept. A forked child cannot use this object, nor make another.
    """

    joins: Final = False  # the driver takes back whole mappings; more than one in a call is not promised
    zeroed: Final = False
    open_to_service: Final = False

    def __init__(self, ordinal: int) -> None:
        self._driver: Final = Driver()
        self._ordinal: Final = ordinal
        self._driver.check_sharing(ordinal)
        self.device: Final = f"cuda:{ordinal}"
        self.device_id: Final = self._driver.uuid(ordinal)
        self.granularity: Final = self._driver.granularity(ordinal)
        self.dlpack_device: Final = (DLPACK_CUDA, ordinal)
        self._copying = threading.Lock()  # over the two below
        self._context: object | None = None
        self._buffer = bytearray()

    def reserve(self, size_bytes: int, address: int | None) -> int:
        with self._room(size_bytes):
            given = self._driver.reserve(size_bytes, wish=address or 0)
        if address is not None and given != address:
            self._driver.free(given, size_bytes)
            raise address_taken(address)
        return given

    def free(self, address: int, size_bytes: int) -> None:
        self._driver.free(address, size_bytes)

    @contextmanager
    def opened(self, chunk: Chunk) -> Iterator[int]:
        try:
            with self._room(chunk.size_bytes):
                handle = self._driver.open(chunk.fd)
        except CudaError as error:
            if error.number not in FOREIGN:
                raise
            raise ValueError(f"the descriptor is no memory of a GPU ({error})") from error
        try:
            yield handle
        finally:
            self._driver.release(handle)

    @contextmanager
    def scratch(self, size_bytes: int) -> Iterator[int]:
        with self._room(size_bytes):
            handle = self._driver.create(self._ordinal, size_bytes)
        try:
            yield handle
        finally:
            self._driver.release(handle)

    def place(self, address: int, size_bytes: int, handle: int, *, writable: bool) -> None:
        with self._room(size_bytes):
            self._driver.map(address, size_bytes, handle)

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        with self._room(size_bytes):
            self._driver.allow(self._ordinal, address, size_bytes, writable=writable)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._driver.unmap(address, size_bytes)

    def read(self, address: int, length: int) -> bytes:
        buffer = bytearray(length)
        with self._copying, self._current():
            self._copy(buffer, address, length)
        return bytes(buffer)

    def write(self, address: int, data: bytes) -> None:
        with self._copying, self._current():
            self._driver.write(address, data)
            self._driver.synchronize()  # the call may return before the copy has been made

    def clear(self, address: int, length: int) -> None:
        with self._copying, self._current():
            self._driver.clear(address, length)
            self._driver.synchronize()

    def digest(self, address: int, length: int, algorithm: Hash) -> bytes:
        """Copies the part to the host as a whole, into a buffer that is kept for the next."""
        with self._copying:
            if len(self._buffer) < length:
                self._buffer = bytearray(length)
            with self._current():
                self._copy(self._buffer, address, length)
            with memoryview(self._buffer) as whole, whole[:length] as part:
                hasher = algorithm()
                hasher.update(part)
                return hasher.digest()

    def _copy(self, buffer: bytearray, address: int, length: int) -> None:
        """Waits for what was handed to the device before, whatever stream it is on."""
        self._driver.synchronize()
        if length:
            self._driver.read(buffer, address, length)

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self._context is None:
            with self._room(CONTEXT_BYTES):
                self._context = self._driver.retain_context(self._ordinal)
        with self._driver.current(self._context):
            yield

    @contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        try:
            yield
        except OutOfMemoryError as error:
            raise GmsError(
                ErrorCode.OUT_OF_MEMORY,
                f"{self.device} has no room for {size_bytes} bytes ({error}); end what else uses it, or take less.",
                retryable=True,
            ) from error
