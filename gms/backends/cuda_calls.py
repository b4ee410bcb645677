"""The CUDA driver's calls that this project makes, through `cuda.bindings`: the only module that knows them.

The calls for memory need no context: the service makes none, so that it costs no GPU memory and no kernel can kill it.
Only copies, which clients make, need one.

Sharing is by POSIX file descriptor. A descriptor, a handle and a mapping each keep the memory; it is freed when all of
them are gone, in every process. Memory is not compressible, which would not be shareable, and can be used by GPUDirect
RDMA where the device says that it may be.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from gms.backends.base import NO_DESCRIPTORS, DeviceError, OutOfMemoryError

HANDLES_AS_FDS: Final = 103
VIRTUAL_MEMORY: Final = 102
RDMA_WITH_VIRTUAL_MEMORY: Final = 110
"""Attributes of a device, by the numbers in cuda.h: their names differ between versions of the bindings."""

FOREIGN: Final = frozenset({1, 101, 304, 400})
"""How opening a descriptor fails that is no memory of a GPU, or of one that this process does not see: invalid value,
invalid device, refused by the operating system, invalid handle. Any other failure is the device's."""

_OUT_OF_MEMORY: Final = 2
_OPERATING_SYSTEM: Final = 304
_SOME_FILES: Final = 8
"""Safely more than the driver opens in one call."""
_EXPORT: Final = "cuMemExportToShareableHandle"
_MAKE: Final = frozenset(
    {
        "cuDevicePrimaryCtxRetain",
        "cuMemAddressReserve",
        "cuMemCreate",
        _EXPORT,
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
    }
)
"""Calls that may find no room, and work later. From any other that answer means that something is broken."""
_DEAD_CONTEXT: Final = "this process's GPU context is dead; end the process and start it again"
_ADVICE: Final = {
    3: "a process that was forked after its parent had used CUDA cannot use it; fork first",
    100: "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no GPU of this number; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    304: "the operating system refused; look at the limits of this process and at access to /dev/nvidia*",
    700: _DEAD_CONTEXT,
    716: _DEAD_CONTEXT,
    717: _DEAD_CONTEXT,
    718: _DEAD_CONTEXT,
    719: _DEAD_CONTEXT,
    801: "the device or its driver cannot do this; use a data-centre GPU with a driver from R525 on",
    803: "driver and CUDA libraries do not fit together; update the driver",
}
_ELSE: Final = "end the process and start it again; if it fails again, look for Xid lines in dmesg"


class CudaError(DeviceError):
    """A driver call failed. `function` and `number` say which and how."""

    def __init__(self, function: str, name: str, number: int) -> None:
        super().__init__(f"{function} failed with {name} ({number}): {_ADVICE.get(number, _ELSE)}.")
        self.function = function
        self.number = number


class Driver:
    """The driver in this process. A device is the ordinal that it has here; handles and addresses are plain numbers.

    Every call raises CudaError, those that make something OutOfMemoryError as well. Calls release the GIL and may come
    from any thread, but not from a forked child: neither the driver nor its contexts survive a fork.
    """

    def __init__(self) -> None:
        """Raises DeviceError if bindings, driver or GPU are missing."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(f"The package cuda-bindings cannot be imported ({error}); install it.") from error
        self._cuda: Any = driver
        self._owner = os.getpid()
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # the bindings look for the library at the first call
            raise DeviceError(
                f"The CUDA driver's libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, give the "
                "container access to the GPU, or use a device cpu:N."
            ) from error
        self._fd_type: Any = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._on_device: Any = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE

    # Devices

    def count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def uuid(self, device: int) -> str:
        """As nvidia-smi writes it: "GPU-" and the UUID; that of the instance where the device is a part of a GPU."""
        # Bindings before 13 have the older call under the plain name, which gives the whole GPU's for each part.
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return f"GPU-{UUID(bytes=bytes(self._call(name, self._device(device)).bytes))}"

    def attribute(self, device: int, number: int) -> int:
        return int(self._call("cuDeviceGetAttribute", self._cuda.CUdevice_attribute(number), self._device(device)))

    def check_sharing(self, device: int) -> None:
        """Raises DeviceError if the device cannot share memory by descriptors."""
        if not (self.attribute(device, VIRTUAL_MEMORY) and self.attribute(device, HANDLES_AS_FDS)):
            raise DeviceError(
                f"The GPU cuda:{device} has no virtual memory that can be shared by file descriptors; use another GPU."
            )

    # Memory: needs no context

    def granularity(self, device: int) -> int:
        """Bytes of which all sizes and addresses of mappings are multiples."""
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), minimum))

    def create(self, device: int, size_bytes: int) -> int:
        """A handle of new memory, whose content is undefined. To be released."""
        return int(self._call("cuMemCreate", size_bytes, self._properties(device), 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """A descriptor for the memory, which the caller closes. No child inherits it."""
        fd = int(self._call(_EXPORT, handle, self._fd_type, 0))
        os.set_inheritable(fd, False)
        return fd

    def open(self, fd: int) -> int:
        """A handle for the memory behind a descriptor, which stays the caller's. To be released, each one."""
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type))

    def reserve(self, size_bytes: int, *, wish: int = 0) -> int:
        """Addresses without memory; the driver need not heed the wish."""
        return int(self._call("cuMemAddressReserve", size_bytes, 0, wish, 0))

    def free(self, address: int, size_bytes: int) -> None:
        """Gives a whole reservation back."""
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Maps all of a handle, accessible to nobody yet. The mapping keeps the memory, the handle may go."""
        self._call("cuMemMap", address, size_bytes, 0, handle, 0)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Takes one whole mapping away."""
        self._call("cuMemUnmap", address, size_bytes)

    def allow(self, device: int, address: int, size_bytes: int, *, writable: bool) -> None:
        """Lets a device access whole mappings that adjoin."""
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location.type, access.location.id = self._on_device, device
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, size_bytes, [access], 1)

    # Copies: need a context

    def retain_context(self, device: int) -> object:
        """The device's primary context, which torch uses as well; made if it is not there, which takes a while and some
        hundred MiB. Kept until `release_context` was called as often."""
        return self._call("cuDevicePrimaryCtxRetain", self._device(device))

    def release_context(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device(device))

    @contextmanager
    def current(self, context: object) -> Iterator[None]:
        """Makes a context this thread's own for the block, and the one before it afterwards."""
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Waits for all work of the current context."""
        self._call("cuCtxSynchronize")

    def read(self, buffer: bytearray, address: int, length: int) -> None:
        """Copies from the device to the start of `buffer`."""
        into = (ctypes.c_ubyte * length).from_buffer(buffer)
        self._call("cuMemcpyDtoH", ctypes.addressof(into), address, length)

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD", address, data, len(data))

    def clear(self, address: int, length: int) -> None:
        """Zeroes memory of the device; may return before it is zero."""
        self._call("cuMemsetD8", address, 0, length)

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _properties(self, device: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_type
        properties.location.type, properties.location.id = self._on_device, device
        properties.allocFlags.gpuDirectRDMACapable = int(bool(self.attribute(device, RDMA_WITH_VIRTUAL_MEMORY)))
        return properties

    def _call(self, function: str, *arguments: object) -> Any:
        """The call's result, or None if it has none."""
        if os.getpid() != self._owner:
            raise DeviceError(f"{function} was called in a fork of the process that uses CUDA; fork first.")
        code, *results = getattr(self._cuda, function)(*arguments)
        number = int(code)
        if number and function in _MAKE:
            if number == _OUT_OF_MEMORY:
                raise OutOfMemoryError(f"{function}: the GPU has no room")
            if (function == _EXPORT and number == _OPERATING_SYSTEM) or not _descriptors_left():
                raise OutOfMemoryError(f"{function}: this process has no descriptors left for it")
        if number:
            raise CudaError(function, getattr(code, "name", "an unknown error"), number)
        return results[0] if results else None


def _descriptors_left() -> bool:
    """Whether some more files could be opened. The driver needs some too, and does not tell that from other errors."""
    opened: list[int] = []
    try:
        while len(opened) < _SOME_FILES:
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return error.errno not in NO_DESCRIPTORS
    finally:
        for fd in opened:
            os.close(fd)
    return True
