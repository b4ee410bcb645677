"""The driver as the cases need it: what `gms` never calls, beside what it does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gms.backends.base import OutOfMemoryError
from gms.backends.cuda_calls import HANDLES_AS_FDS, RDMA_WITH_VIRTUAL_MEMORY, VIRTUAL_MEMORY, CudaError, Driver

MIB = 1 << 20


class Probe(Driver):
    def name(self, device: int) -> str:
        return bytes(self._call("cuDeviceGetName", 256, self._device(device))).split(b"\0")[0].decode()

    def version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def total_bytes(self, device: int) -> int:
        return int(self._call("cuDeviceTotalMem", self._device(device)))

    def free_bytes(self) -> int:
        """Of the current context's device, by all processes' use of it."""
        return int(self._call("cuMemGetInfo"))

    def context(self) -> int:
        """0: none is current."""
        return int(self._call("cuCtxGetCurrent"))

    def use(self, context: object) -> None:
        """Makes a context this thread's for good: for a process that is about to kill it."""
        self._call("cuCtxSetCurrent", context)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """By a kernel, not a copy. Waits for nothing."""
        self._call("cuMemsetD8", address, value, size_bytes)

    def bytes_at(self, address: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read(buffer, address, length)
        return bytes(buffer)

    def export_raw(self, handle: int) -> int:
        """As the driver gives it."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def error_name(self, number: int) -> str:
        return str(getattr(self._cuda.CUresult(number), "name", number))

    def outcome(self, call: Callable[..., object], *arguments: object, **named: object) -> str:
        """What a call comes to: done, out of memory, or refused and by which error."""
        try:
            call(*arguments, **named)
        except CudaError as error:
            return f"refused: {self.error_name(error.number)}"
        except OutOfMemoryError:
            return "out of memory"
        return "done"


@contextmanager
def computing() -> Iterator[Probe]:
    """With the primary context of the first GPU."""
    probe = Probe()
    context = probe.retain_context(0)
    try:
        with probe.current(context):
            yield probe
    finally:
        probe.release_context(0)


@contextmanager
def created(probe: Probe, size_bytes: int) -> Iterator[int]:
    handle = probe.create(0, size_bytes)
    try:
        yield handle
    finally:
        probe.release(handle)


@contextmanager
def reserved(probe: Probe, size_bytes: int, *, wish: int = 0) -> Iterator[int]:
    address = probe.reserve(size_bytes, wish=wish)
    try:
        yield address
    finally:
        probe.free(address, size_bytes)


@contextmanager
def mapped(probe: Probe, size_bytes: int, handle: int, *, writable: bool) -> Iterator[int]:
    with reserved(probe, size_bytes) as address:
        probe.map(address, size_bytes, handle)
        try:
            probe.allow(0, address, size_bytes, writable=writable)
            yield address
        finally:
            probe.unmap(address, size_bytes)


@contextmanager
def opened(probe: Probe, fd: int, size_bytes: int, *, writable: bool) -> Iterator[int]:
    """The memory behind a descriptor, at an address."""
    handle = probe.open(fd)
    try:
        with mapped(probe, size_bytes, handle, writable=writable) as address:
            yield address
    finally:
        probe.release(handle)


def main() -> None:
    """`python -m tests.gpu.driver`: says in one line of JSON what the first GPU is, or {"reason": what is missing}.

    It stays until its input ends: a GPU that nobody uses goes to sleep, and the next process pays for waking it.
    """
    from gms.backends.base import DeviceError

    try:
        probe = Probe()
        probe.check_sharing(0)
        context = probe.retain_context(0)
        with probe.current(context):
            free = probe.free_bytes()
        probe.release_context(0)
    except (DeviceError, OutOfMemoryError) as error:
        print(json.dumps({"reason": str(error)}), flush=True)
        return
    numbers = {"102": VIRTUAL_MEMORY, "103": HANDLES_AS_FDS, "110": RDMA_WITH_VIRTUAL_MEMORY}
    found = {
        "name": probe.name(0),
        "uuid": probe.uuid(0),
        "driver": probe.version(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "free_bytes": free,
        "total_bytes": probe.total_bytes(0),
        "granularity": probe.granularity(0),
        "attributes": {name: probe.attribute(0, number) for name, number in numbers.items()},
    }
    print(json.dumps(found), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
