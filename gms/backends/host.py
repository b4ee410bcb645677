"""Host memory: one memfd an allocation.

The size is sealed from the start: a client that could shrink a file would turn another's mapping into a SIGBUS. Pages
are filled by the service, so that they are charged to it and not to whoever touches them first. Freezing adds
F_SEAL_WRITE: F_SEAL_FUTURE_WRITE would leave the writer's own mapping writable, and a mere read-only descriptor can be
reopened through /proc. The kernel refuses F_SEAL_WRITE while a shared writable mapping exists (EBUSY), a mapping made
read-only from a writable descriptor included: it could be made writable later.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Final

from gms import libc
from gms.backends.base import OutOfMemoryError, StillMappedError

_NO_ROOM: Final = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EFAULT, errno.EMFILE, errno.ENFILE})
"""EFAULT is what populating gives where touching would be a SIGBUS: no page could be had."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    fd: int
    size_bytes: int


class HostBackend:
    """A MemoryBackend over memfd_create."""

    granularity: Final = libc.PAGE_BYTES
    slice_bytes: Final = 64 * 1024 * 1024

    def create(self, tag: str, size_bytes: int) -> HostPages:
        """Refuses what the machine plainly lacks before a page is touched: filling up to the very end would leave the
        choice of a victim to the kernel. A container's own limit is not looked at; --memory-limit stands for it."""
        available = _available_bytes()
        if size_bytes > available:
            raise OutOfMemoryError(f"{available} are available")
        try:
            fd = _memfd(f"gms:{tag}"[:200])
            try:
                os.ftruncate(fd, size_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise _translated(error) from error
        return HostPages(fd, size_bytes)

    def populate(self, pages: HostPages, offset: int, length: int) -> None:
        try:
            address = libc.mmap(None, length, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, pages.fd, offset)
            try:
                libc.madvise(address, length, libc.MADV_POPULATE_WRITE)
            except OSError as error:
                if (
                    error.errno != errno.EINVAL
                ):  # before Linux 5.14: allocates as well, but leaves the zeroing to the first touch
                    raise
                os.posix_fallocate(pages.fd, offset, length)
            finally:
                libc.munmap(address, length)
        except OSError as error:
            raise _translated(error) from error

    def freeze(self, pages: HostPages) -> None:
        if fcntl.fcntl(pages.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            return
        try:
            fcntl.fcntl(pages.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise StillMappedError from error
            raise

    def share(self, pages: HostPages, *, writable: bool) -> int:
        if writable:
            return os.dup(pages.fd)
        return os.open(f"/proc/self/fd/{pages.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def destroy(self, pages: HostPages) -> None:
        os.close(pages.fd)


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | libc.MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3
            raise
        return os.memfd_create(name, flags)


def _translated(error: OSError) -> Exception:
    return OutOfMemoryError(error.strerror or str(error)) if error.errno in _NO_ROOM else error
