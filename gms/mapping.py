"""Addresses that stay while the memory behind them comes and goes: the client side of the memory service.

An engine reserves a range once, builds its tensors over it, and from then on only the backing changes: nothing, a
small scratch chunk mapped again and again for warm-up, or the service's pages. The addresses stay the same, so that no
tensor, and no captured graph, ever has to be told.

What a device does differently is a `DeviceMemory` (`gms.devices`). `Reservation` is the same over all of them, keeps
account of each chunk that is mapped, and so takes back exactly those when a step fails.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from types import TracebackType
from typing import Final, Self

from gms import backing, libc
from gms.backends.base import DeviceError, Hash
from gms.backing import Stretch
from gms.devices import DLPACK_CPU, Chunk, DeviceMemory, HostMemory
from gms.protocol import ErrorCode, GmsError

__all__ = [
    "Backing",
    "Chunk",
    "DeviceError",
    "DeviceMemory",
    "Hash",
    "HostMemory",
    "Reservation",
    "device_memory",
]

MAX_SCRATCH_MAPPINGS: Final = 32768
"""Half of the kernel's default vm.max_map_count (65530): the rest is the engine's."""


class Backing(Enum):
    NONE = auto()
    PAGES_RO = auto()
    PAGES_RW = auto()
    SCRATCH = auto()


class Reservation:
    """A range of addresses, `size_bytes` rounded up to the device's granularity, at a constant `address`.

    With `address` the range is placed exactly there, or GmsError(not_permitted) if it is taken. Touching the range
    while `backing` is NONE is a SIGSEGV, or the end of the GPU context. `close()` gives the addresses back: no tensor
    over them may be used after it. There is no finalizer on purpose: tensors outlive Python references to this object.
    Whoever changes the backing vouches that nothing works on the range meanwhile, no kernel on a GPU either.
    """

    def __init__(self, size_bytes: int, *, memory: DeviceMemory | None = None, address: int | None = None) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a reservation needs a positive size, not {size_bytes}")
        self.memory: Final[DeviceMemory] = HostMemory() if memory is None else memory
        self.size_bytes: Final = libc.round_up(size_bytes, self.memory.granularity)
        self._kind = Backing.NONE
        self._mapped: list[tuple[int, int]] = []  # address and size of each that `unmap` must take as a whole
        self._chunk_bytes: list[int] = []  # of what `map` has put there
        self._mirrors: dict[int, tuple[int, int]] = {}  # where else: how many bytes, of which chunk
        self._closed = False
        self.address: Final = self.memory.reserve(self.size_bytes, address)

    @property
    def backing(self) -> Backing:
        return self._kind if self._mapped else Backing.NONE

    @property
    def mapped_bytes(self) -> int:
        """Bytes with memory behind them, from the start of the range on."""
        return sum(size for _, size in self._mapped)

    def map(self, chunks: Sequence[Chunk], *, writable: bool) -> None:
        """Puts whole chunks behind the range, one after the other from its start on, in place of what stood there. On
        any error nothing stands behind it.

        Raises ValueError if they do not fit or a descriptor is not such a chunk; OSError from mmap (EPERM or EACCES:
        the pages are sealed, or the descriptor is read-only); DeviceError.
        """
        self._open()
        length = sum(chunk.size_bytes for chunk in chunks)
        unit = self.memory.granularity
        if any(chunk.size_bytes <= 0 or chunk.size_bytes % unit for chunk in chunks):
            raise ValueError(f"the sizes of chunks must be multiples of {unit}: {[c.size_bytes for c in chunks][:8]}")
        if not 0 < length <= self.size_bytes:
            raise ValueError(f"{len(chunks)} chunks of {length} bytes do not fit into {self.size_bytes}")
        with self._replacing(Backing.PAGES_RW if writable else Backing.PAGES_RO):
            at = self.address
            self._chunk_bytes = [chunk.size_bytes for chunk in chunks]
            for chunk in chunks:
                with self.memory.opened(chunk) as handle:
                    at = self._place(at, chunk.size_bytes, handle, writable=writable)
            self.memory.allow(self.address, length, writable=writable)

    def map_scratch(self, chunk_bytes: int) -> None:
        """Backs the whole range with one chunk of `chunk_bytes`, mapped again and again: every read and write works,
        what was written means nothing, and the cost is one chunk of memory. A rest at the end, which a device could
        not map from a part of that chunk, is a second, smaller one.

        Raises ValueError if that would take more than MAX_SCRATCH_MAPPINGS mappings, GmsError(out_of_memory).
        """
        self._open()
        chunk = min(libc.round_up(chunk_bytes, self.memory.granularity), self.size_bytes)
        if chunk <= 0 or self.size_bytes > chunk * MAX_SCRATCH_MAPPINGS:
            raise ValueError(
                f"a scratch chunk of {chunk_bytes} bytes needs more than {MAX_SCRATCH_MAPPINGS} mappings for "
                f"{self.size_bytes} bytes; use a larger chunk"
            )
        times, rest = divmod(self.size_bytes, chunk)
        with self._replacing(Backing.SCRATCH):
            at = self.address
            with self.memory.scratch(chunk) as handle:
                for _ in range(times):
                    at = self._place(at, chunk, handle, writable=True)
            if rest:
                with self.memory.scratch(rest) as handle:
                    self._place(at, rest, handle, writable=True)
            self.memory.allow(self.address, self.size_bytes, writable=True)

    def mirror(self, offset: int, length: int, to: int) -> None:
        """Puts the pages of a part of the range at the address `to` as well, in place of what is mapped there, and with
        the same rights. They stay there when the range is unmapped or closed, until their process ends or somebody maps
        over them.

        Raises ValueError if nothing is mapped there or the parts are no whole pages, GmsError(wrong_device) if it is no
        host memory, OSError from mremap; part of it may have been done then."""
        start = self._within(offset, length)
        if self.memory.dlpack_device[0] != DLPACK_CPU:
            raise GmsError(ErrorCode.WRONG_DEVICE, f"Pages of {self.memory.device} have one address.")
        if self._kind is Backing.SCRATCH:
            raise ValueError("what is mapped is scratch")
        if offset % libc.PAGE_BYTES or length % libc.PAGE_BYTES or to % libc.PAGE_BYTES:
            raise ValueError(f"{length} bytes at {offset} to {to:#x} are no whole pages")
        at, end = self.address, start + length
        for number, size_bytes in enumerate(self._chunk_bytes):  # each is a mapping of its own
            first, last = max(at, start), min(at + size_bytes, end)
            if first < last:
                libc.mirror(first, last - first, to + first - start)
                self._mirrors[to + first - start] = (last - first, number)
            at += size_bytes

    def unmap(self) -> None:
        """Takes the memory away and keeps the addresses. Harmless if nothing stands behind them. If it fails, what is
        still mapped is known, and `unmap` can be called again."""
        self._open()
        while self._mapped:
            self.memory.unmap(*self._mapped[-1])
            self._mapped.pop()

    def buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The range as a ctypes array, for `torch.frombuffer` or `memoryview`. Touches no page. Raises
        GmsError(wrong_device) if it is no host memory, which a CPU must not touch."""
        self._open()
        if self.memory.dlpack_device[0] != DLPACK_CPU:
            raise GmsError(
                ErrorCode.WRONG_DEVICE,
                f"Memory of {self.memory.device} has no buffer in this process; make a tensor over it, or use read().",
            )
        return (ctypes.c_ubyte * self.size_bytes).from_address(self.address)

    def read(self, offset: int, length: int) -> bytes:
        """A copy of mapped memory. Raises ValueError if nothing is mapped there."""
        return self.memory.read(self._within(offset, length), length)

    def write(self, offset: int, data: bytes) -> None:
        """Copies to mapped memory. Raises ValueError if nothing is mapped there, GmsError(not_permitted) if it is
        mapped read-only."""
        at = self._within(offset, len(data))
        if self._kind is Backing.PAGES_RO:
            raise _read_only()
        self.memory.write(at, data)

    def clear(self) -> None:
        """Zeroes all that is mapped. Scratch is zeroed once, however often it stands behind the range.

        Raises ValueError if nothing is mapped, GmsError(not_permitted) if it is mapped read-only."""
        self._within(0, 1)
        if self._kind is Backing.PAGES_RO:
            raise _read_only()
        # The chunk that is mapped again and again comes first, and a smaller one for the rest last.
        parts = [self._mapped[0], self._mapped[-1]] if self._kind is Backing.SCRATCH else self._mapped
        for address, size_bytes in parts:
            self.memory.clear(address, size_bytes)

    def digest(self, offset: int, length: int, algorithm: Hash) -> bytes:
        """The digest of mapped memory. Raises ValueError if nothing is mapped there."""
        return self.memory.digest(self._within(offset, length), length, algorithm)

    def fault(self, chunks: Sequence[Chunk] = ()) -> str | None:
        """What is behind the range other than `chunks`, read-only, and nothing where they end, or where they are
        mirrored; None: nothing is. Only host memory can be looked at in this way: for any other the answer is None."""
        self._open()
        if self.memory.dlpack_device[0] != DLPACK_CPU:
            return None
        at, end = self.address, self.address + self.size_bytes
        wanted, inodes = [], []
        for chunk in chunks:
            inodes.append(os.fstat(chunk.fd).st_ino)
            wanted.append(Stretch(at, at + chunk.size_bytes, backing.READ_ONLY, inodes[-1]))
            at += chunk.size_bytes
        if at < end:
            wanted.append(Stretch(at, end, backing.NOTHING, 0))
        for to, (length, number) in self._mirrors.items() if chunks else ():
            wanted.append(Stretch(to, to + length, backing.READ_ONLY, inodes[number]))
        wanted.sort()
        with open("/proc/self/maps", "rb") as maps:
            return backing.fault(backing.stretches(maps, wanted[0].start, wanted[-1].end), wanted)

    def close(self) -> None:
        """Takes the memory away and gives the addresses back. Idempotent."""
        if not self._closed:
            self.unmap()
            self.memory.free(self.address, self.size_bytes)
            self._closed = True

    def _place(self, at: int, size_bytes: int, handle: int, *, writable: bool) -> int:
        """Maps one chunk, notes it, and returns the address behind it."""
        self.memory.place(at, size_bytes, handle, writable=writable)
        if self._mapped and self.memory.joins:
            self._mapped[-1] = (self._mapped[-1][0], self._mapped[-1][1] + size_bytes)
        else:
            self._mapped.append((at, size_bytes))
        return at + size_bytes

    @contextmanager
    def _replacing(self, kind: Backing) -> Iterator[None]:
        """Around the mapping of something new: nothing before it, all or nothing after it."""
        self.unmap()
        self._kind = kind
        try:
            yield
        except BaseException:
            self.unmap()
            raise

    def _within(self, offset: int, length: int) -> int:
        self._open()
        if offset < 0 or length < 0 or offset + length > self.mapped_bytes:
            raise ValueError(f"{length} bytes at {offset} are not mapped: {self.mapped_bytes} are, from 0 on")
        return self.address + offset

    def _open(self) -> None:
        if self._closed:
            raise GmsError(ErrorCode.CLOSED, "The reservation was closed by its owner; its addresses are gone.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _read_only() -> GmsError:
    return GmsError(ErrorCode.NOT_PERMITTED, "The pages are mapped read-only; only their writer may write them.")


def device_memory(name: str) -> DeviceMemory:
    """The memory of "cpu:N" or "cuda:N". Raises GmsError(wrong_device) for another name, DeviceError if there is no
    such GPU or no driver."""
    found = re.fullmatch(r"(cpu|cuda):([0-9]{1,4})", name)
    if found is None:
        raise GmsError(ErrorCode.WRONG_DEVICE, f"The device {name!r} is unknown; use cpu:N or cuda:N.")
    if found[1] == "cpu":
        return HostMemory(name)
    from gms.cuda_mapping import CudaMemory  # who has no GPU need not have the bindings

    return CudaMemory(int(found[2]))
