"""The few memory calls that Python does not offer, or offers without releasing the GIL.

All raise OSError with errno and the name of the call. ctypes releases the GIL around each of them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

PROT_NONE: Final = 0
PROT_READ: Final = 1
PROT_WRITE: Final = 2
MAP_SHARED: Final = 0x01
MAP_PRIVATE: Final = 0x02
MAP_FIXED: Final = 0x10
MAP_ANONYMOUS: Final = 0x20
MAP_NORESERVE: Final = 0x4000
MAP_FIXED_NOREPLACE: Final = 0x100000
MADV_DONTFORK: Final = 10
MADV_POPULATE_WRITE: Final = 23
MREMAP_MAYMOVE: Final = 1
MREMAP_FIXED: Final = 2
PR_SET_PDEATHSIG: Final = 1
MFD_NOEXEC_SEAL: Final = 0x0008
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_LIBC.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def round_up(size: int, granularity: int = PAGE_BYTES) -> int:
    return -(-size // granularity) * granularity


def mmap(address: int | None, length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    result: int | None = _LIBC.mmap(address, length, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _error("mmap")
    return result


def munmap(address: int, length: int) -> None:
    if _LIBC.munmap(address, length):
        raise _error("munmap")


def madvise(address: int, length: int, advice: int) -> None:
    if _LIBC.madvise(address, length, advice):
        raise _error("madvise")


def mirror(address: int, length: int, to: int) -> None:
    """The shared pages at `address`, one mapping, at `to` as well, in place of what is there."""
    # A length of 0 says that the old mapping stays.
    result: int | None = _LIBC.mremap(address, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, to)
    if result is None or result == _MAP_FAILED:
        raise _error("mremap")


def prctl(option: int, argument: int) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0):
        raise _error("prctl")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
