"""How a process maps the memory of one device: the protocol, and host memory. `gms.cuda_mapping` has a GPU's.

`gms.mapping` builds on it, and is what clients use.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NamedTuple, Protocol

from gms import libc
from gms.backends.base import Hash
from gms.libc import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
)
from gms.protocol import ErrorCode, GmsError

DLPACK_CPU: Final = 1
DLPACK_CUDA: Final = 2

_NOTHING: Final = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


class Chunk(NamedTuple):
    """One piece of an allocation, `size_bytes` of it behind `fd`, which stays its owner's."""

    fd: int
    size_bytes: int


class DeviceMemory(Protocol):
    """How this process maps memory of one device. A handle is what `place` takes: a number of the device's own.

    Every method may raise DeviceError, after which the device is of no more use to this process.
    """

    @property
    def device(self) -> str:
        """What it is called here: "cpu:0", "cuda:1"."""
        ...

    @property
    def device_id(self) -> str:
        """What it is, whatever number it has here: the name of a host device, "GPU-<uuid>"."""
        ...

    @property
    def granularity(self) -> int:
        """Sizes of reservations and chunks are multiples of this many bytes."""
        ...

    @property
    def dlpack_device(self) -> tuple[int, int]:
        """DLPack's device type and number."""
        ...

    @property
    def joins(self) -> bool:
        """Whether chunks that adjoin may be unmapped as one."""
        ...

    @property
    def zeroed(self) -> bool:
        """Whether new memory is zero. A GPU's may hold anything, numbers that are none among it."""
        ...

    @property
    def open_to_service(self) -> bool:
        """Whether the memory service can read it, and so hash it by itself."""
        ...

    def reserve(self, size_bytes: int, address: int | None) -> int:
        """Addresses without memory, exactly at `address` if one is given. Raises GmsError(not_permitted) if that is
        taken, GmsError(out_of_memory)."""
        ...

    def free(self, address: int, size_bytes: int) -> None:
        """Gives a whole reservation back; nothing is mapped in it."""
        ...

    def opened(self, chunk: Chunk) -> AbstractContextManager[int]:
        """A handle for a chunk; what was placed stays after it is closed. Raises ValueError if there is less than the
        chunk promises, or no memory of this device at all."""
        ...

    def scratch(self, size_bytes: int) -> AbstractContextManager[int]:
        """A handle for new memory of no particular content. Raises GmsError(out_of_memory)."""
        ...

    def place(self, address: int, size_bytes: int, handle: int, *, writable: bool) -> None:
        """Maps the whole of a handle at an address of a reservation where nothing is mapped."""
        ...

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Makes whole chunks that were placed accessible; before, they need not be."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Takes the memory of one chunk away, or of several that adjoin if the device `joins`; the addresses stay."""
        ...

    def read(self, address: int, length: int) -> bytes:
        """A copy of mapped memory, of what all work handed to the device before leaves there."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Copies to writable memory."""
        ...

    def clear(self, address: int, length: int) -> None:
        """Zeroes writable memory, and waits until it is zero."""
        ...

    def digest(self, address: int, length: int, algorithm: Hash) -> bytes:
        """The digest of mapped memory, as `read` would see it; keeps at most some 64 MiB of it in between."""
        ...


class HostMemory:
    """A DeviceMemory over mmap. `name` is "cpu:N"; what N is, is for who names the services to say."""

    granularity: Final = libc.PAGE_BYTES
    dlpack_device: Final = (DLPACK_CPU, 0)
    joins: Final = True
    zeroed: Final = True
    open_to_service: Final = True

    def __init__(self, name: str = "cpu:0") -> None:
        self.device: Final = name
        self.device_id: Final = name

    def reserve(self, size_bytes: int, address: int | None) -> int:
        if address is None:
            return libc.mmap(None, size_bytes, PROT_NONE, _NOTHING)
        try:
            given = libc.mmap(address, size_bytes, PROT_NONE, _NOTHING | MAP_FIXED_NOREPLACE)
        except FileExistsError as error:
            raise address_taken(address) from error
        if given != address:  # a kernel before 4.17 takes the address as a hint
            libc.munmap(given, size_bytes)
            raise address_taken(address)
        return given

    def free(self, address: int, size_bytes: int) -> None:
        libc.munmap(address, size_bytes)

    @contextmanager
    def opened(self, chunk: Chunk) -> Iterator[int]:
        """A file that is shorter than promised is refused: touching the rest would be a SIGBUS."""
        size = os.fstat(chunk.fd).st_size
        if size < chunk.size_bytes:
            raise ValueError(f"the file of a chunk of {chunk.size_bytes} bytes has only {size}")
        yield chunk.fd

    @contextmanager
    def scratch(self, size_bytes: int) -> Iterator[int]:
        fd = os.memfd_create("gms-scratch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            yield fd
        finally:
            os.close(fd)

    def place(self, address: int, size_bytes: int, handle: int, *, writable: bool) -> None:
        """Writable memory is not inherited by forks: a child that outlives its engine could otherwise go on writing
        into pages that belong to the next one."""
        try:
            if writable:
                libc.mmap(address, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handle)
                libc.madvise(address, size_bytes, libc.MADV_DONTFORK)
            else:
                _map_read_only(address, size_bytes, handle)
        except OSError:
            self.unmap(address, size_bytes)  # a failed mmap may have left a hole, which others could be placed in
            raise

    def allow(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Nothing to do: `place` has said it."""

    def unmap(self, address: int, size_bytes: int) -> None:
        libc.mmap(address, size_bytes, PROT_NONE, _NOTHING | MAP_FIXED)

    def read(self, address: int, length: int) -> bytes:
        return ctypes.string_at(address, length)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def clear(self, address: int, length: int) -> None:
        ctypes.memset(address, 0, length)

    def digest(self, address: int, length: int, algorithm: Hash) -> bytes:
        hasher = algorithm()
        hasher.update(memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B"))
        return hasher.digest()


def _map_read_only(address: int, size_bytes: int, fd: int) -> None:
    """Before Linux 6.7 sealed pages could not be mapped by a descriptor that can write, as their writer's can."""
    try:
        libc.mmap(address, size_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd)
    except PermissionError:
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc.mmap(address, size_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, reader)
        finally:
            os.close(reader)


def address_taken(address: int) -> GmsError:
    return GmsError(ErrorCode.NOT_PERMITTED, f"The address {address:#x} is taken in this process; ask for another.")
