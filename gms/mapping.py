"""Addresses that stay while the memory behind them comes and goes: the client side of the memory service.

An engine reserves a range once, builds its tensors over it, and from then on only the backing changes: nothing
(PROT_NONE), a small scratch chunk mapped again and again for warm-up, or the service's pages. Every change is an mmap
over the same addresses, so that no tensor, and no captured graph, ever has to be told.
"""

from __future__ import annotations

import ctypes
import os
from enum import Enum, auto
from types import TracebackType
from typing import Final, Self

from gms import libc
from gms.libc import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_NORESERVE,
    MAP_PRIVATE,
    MAP_SHARED,
    PAGE_BYTES,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
)
from gms.protocol import ErrorCode, GmsError

MAX_SCRATCH_MAPPINGS: Final = 32768
"""Half of the kernel's default vm.max_map_count (65530): the rest is the engine's."""

_NOTHING: Final = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


class Backing(Enum):
    NONE = auto()
    PAGES_RO = auto()
    PAGES_RW = auto()
    SCRATCH = auto()


class Reservation:
    """A range of addresses, `size_bytes` rounded up to whole pages, at a constant `address`.

    With `address` the range is placed exactly there, or OSError(EEXIST) if something is mapped there already. Touching
    the range while `backing` is NONE is a SIGSEGV. `close()` gives the addresses back: whatever `buffer()` returned
    must not be used after it. There is no finalizer on purpose: tensors outlive Python references to this object.
    """

    def __init__(self, size_bytes: int, *, address: int | None = None) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a reservation needs a positive size, not {size_bytes}")
        self.size_bytes = libc.round_up(size_bytes)
        self._backing = Backing.NONE
        self._closed = False
        place = MAP_FIXED_NOREPLACE if address is not None else 0
        self.address = libc.mmap(address, self.size_bytes, PROT_NONE, _NOTHING | place)
        if address is not None and self.address != address:  # a kernel before 4.17 takes the address as a hint
            libc.munmap(self.address, self.size_bytes)
            raise GmsError(
                ErrorCode.NOT_PERMITTED,
                f"The address {address:#x} is taken in this process; ask for another.",
            )

    @property
    def backing(self) -> Backing:
        return self._backing

    def map(self, fd: int, *, writable: bool, offset: int = 0, length: int | None = None, at: int = 0) -> None:
        """Puts pages of `fd` (`length` bytes from `offset` on, by default the rest of it) at `at` within the range.

        A part of the range may be mapped while nothing, or pages of the same kind, stand behind the rest; a map of
        the whole range replaces whatever was there. Writable pages are not inherited by forks: a child that outlives
        its engine could otherwise go on writing into pages that belong to the next one.

        Raises ValueError for a part outside range or file (a mapping past the end would be a SIGBUS later), OSError
        from mmap (EPERM or EACCES: pages are sealed, or the descriptor is read-only), GmsError(busy) for a mix.
        """
        rest = os.fstat(fd).st_size - offset
        length = rest if length is None else length
        if offset % PAGE_BYTES or at % PAGE_BYTES or offset < 0 or at < 0:
            raise ValueError(f"offset {offset} and place {at} must be multiples of {PAGE_BYTES}")
        if length <= 0 or length > rest or at + libc.round_up(length) > self.size_bytes:
            raise ValueError(
                f"{length} bytes at {at} do not fit: the file has {rest} from offset {offset} on, "
                f"the reservation {self.size_bytes}"
            )
        backing = Backing.PAGES_RW if writable else Backing.PAGES_RO
        whole = at == 0 and libc.round_up(length) == self.size_bytes
        if not whole and self._backing not in (Backing.NONE, backing):
            raise GmsError(
                ErrorCode.BUSY,
                f"The range is backed by {self._backing.name}; unmap it before mapping a part of it otherwise.",
            )
        self._open()
        protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        libc.mmap(self.address + at, length, protection, MAP_SHARED | MAP_FIXED, fd, offset)
        self._backing = backing
        if writable:
            libc.madvise(self.address + at, length, libc.MADV_DONTFORK)

    def map_scratch(self, chunk_bytes: int) -> None:
        """Backs the whole range with one chunk of `chunk_bytes`, mapped again and again: every read and write works,
        what was written means nothing, and the cost is one chunk of memory. Raises ValueError if that would take more
        than MAX_SCRATCH_MAPPINGS mappings."""
        chunk = min(libc.round_up(chunk_bytes), self.size_bytes)
        if chunk <= 0 or self.size_bytes > chunk * MAX_SCRATCH_MAPPINGS:
            raise ValueError(
                f"a scratch chunk of {chunk_bytes} bytes needs more than {MAX_SCRATCH_MAPPINGS} mappings for "
                f"{self.size_bytes} bytes; use a larger chunk"
            )
        self._open()
        fd = os.memfd_create("gms-scratch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, chunk)
            self._backing = Backing.SCRATCH
            for at in range(0, self.size_bytes, chunk):
                part = min(chunk, self.size_bytes - at)
                libc.mmap(self.address + at, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd)
        except OSError:
            self.unmap()
            raise
        finally:
            os.close(fd)

    def unmap(self) -> None:
        """Takes the memory away in one call and keeps the addresses. Harmless if nothing stands behind them."""
        self._open()
        libc.mmap(self.address, self.size_bytes, PROT_NONE, _NOTHING | MAP_FIXED)
        self._backing = Backing.NONE

    def buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The range as a ctypes array, for `torch.frombuffer` or `memoryview`. Touches no page."""
        self._open()
        return (ctypes.c_ubyte * self.size_bytes).from_address(self.address)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backing = Backing.NONE
            libc.munmap(self.address, self.size_bytes)

    def _open(self) -> None:
        if self._closed:
            raise GmsError(ErrorCode.CLOSED, "The reservation was closed by its owner; its addresses are gone.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
