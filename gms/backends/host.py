"""Host memory: one memfd a chunk.

The size is sealed from the start: a client that could shrink a file would turn another's mapping into a SIGBUS. Pages
are filled by the service, so that they are charged to it and not to whoever touches them first. Freezing adds
F_SEAL_WRITE: F_SEAL_FUTURE_WRITE would leave the writer's own mapping writable, and a mere read-only descriptor can be
reopened through /proc. The kernel refuses F_SEAL_WRITE while a shared writable mapping exists (EBUSY), a mapping made
read-only from a writable descriptor included: it could be made writable later.

A chunk that is handed back is known by device, inode, size and seals, all of which the kernel vouches for; what is in
it is for checksums to say.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gms import libc
from gms.backends.available import available
from gms.backends.base import (
    NO_DESCRIPTORS,
    ForeignPagesError,
    Hash,
    Identity,
    OutOfMemoryError,
    StillMappedError,
)

_NO_ROOM: Final = NO_DESCRIPTORS | {errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EFAULT}
"""EFAULT is what populating gives where touching would be a SIGBUS: no page could be had."""

SPARE_BYTES: Final = 8 * 1024 * 1024
SPARE_SHARE: Final = 128
"""What is left free: this much, and one byte for so many. The kernel counts page tables and the like too, a byte for
200, in batches of its own; and the service must go on. A container that is filled to its limit is not told, but
killed."""


READ_BYTES: Final = 512 * 1024
"""What is hashed at a time: fits into a CPU's cache, and each read and each hash is long beside its call."""

_FROZEN: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    fd: int
    size_bytes: int


class HostBackend:
    """A MemoryBackend over memfd_create. `device_id` is the name of the device ("cpu:0"), which is all that it is.

    Chunks need not be small here, so that by default an allocation is one; `chunk_bytes` makes them so.
    """

    granularity: Final = libc.PAGE_BYTES
    slice_bytes: Final = 64 * 1024 * 1024
    readable: Final = True
    descriptors_per_chunk: Final = 1

    def __init__(self, device_id: str = "cpu:0", *, chunk_bytes: int = 1 << 48) -> None:
        if chunk_bytes <= 0 or chunk_bytes % self.granularity:
            raise ValueError(f"chunks must be a multiple of {self.granularity} bytes, not {chunk_bytes}")
        self.device_id: Final = device_id
        self.chunk_bytes: Final = chunk_bytes
        self._buffer = bytearray(READ_BYTES)
        self._unfilled: dict[int, int] = {}  # descriptor -> bytes that were promised and are not taken yet

    def create(self, tag: str, size_bytes: int) -> HostPages:
        """Refuses what plainly is not there before a page is touched: filling up to the very end would leave the
        choice of a victim to the kernel."""
        left = available()
        promised = sum(self._unfilled.values())
        needed = size_bytes + promised
        if needed + needed // SPARE_SHARE + SPARE_BYTES > left.size_bytes:
            room = (left.size_bytes - SPARE_BYTES) * SPARE_SHARE // (SPARE_SHARE + 1) - promised
            raise OutOfMemoryError(
                f"{left.where} has {left.size_bytes} bytes left, of which {promised} are promised and "
                f"{needed // SPARE_SHARE + SPARE_BYTES} must stay free",
                room_bytes=max(room, 0),
            )
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
        self._unfilled[fd] = size_bytes
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
        self._unfilled[pages.fd] -= length

    def freeze(self, pages: HostPages) -> None:
        if fcntl.fcntl(pages.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            return
        try:
            fcntl.fcntl(pages.fd, fcntl.F_ADD_SEALS, _FROZEN)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise StillMappedError from error
            raise

    def digest(self, pages: HostPages, offset: int, length: int, algorithm: Hash) -> bytes:
        """Copies to a buffer that stays in the CPU's cache, which is quicker than to map pages that are read once."""
        hasher = algorithm()
        with memoryview(self._buffer) as buffer:
            while length:
                with buffer[: min(length, READ_BYTES)] as part:
                    got = os.preadv(pages.fd, [part], offset)
                    if not got:
                        raise EOFError(f"the file of a chunk of {pages.size_bytes} bytes ends at {offset}")
                    with part[:got] as read:
                        hasher.update(read)
                offset += got
                length -= got
        return hasher.digest()

    def identify(self, pages: HostPages) -> Identity:
        return _identity(pages.fd)

    def frozen(self, identity: Identity) -> Identity:
        return structs.replace(identity, seals=identity.seals | _FROZEN)

    def adopt(self, fd: int, identity: Identity) -> HostPages:
        """A reader's descriptor will do for sealed pages, whose readers and checksums are all that is left to serve;
        pages that are still written need one that can write."""
        try:
            found = _identity(fd)
        except OSError as error:
            raise ForeignPagesError(f"it is no memory that this service made ({error.strerror})") from error
        differences = (
            f"its {name} is {getattr(found, name)}, not {getattr(identity, name)}"
            for name in identity.__struct_fields__
            if getattr(found, name) != getattr(identity, name)
        )
        if difference := "; ".join(differences):
            raise ForeignPagesError(difference)
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if access != os.O_RDWR and not identity.seals & fcntl.F_SEAL_WRITE:
            raise ForeignPagesError("it cannot be written through, though the pages are not sealed")
        try:
            return HostPages(os.dup(fd), identity.size_bytes)
        except OSError as error:
            raise _translated(error) from error

    def share(self, pages: HostPages, *, writable: bool) -> int:
        if writable:
            return os.dup(pages.fd)
        return os.open(f"/proc/self/fd/{pages.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def destroy(self, pages: HostPages) -> None:
        self._unfilled.pop(pages.fd, None)
        os.close(pages.fd)


def _identity(fd: int) -> Identity:
    """Raises OSError for what is no memfd: seals are asked for first, and nothing else has them."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    file = os.fstat(fd)
    return Identity(size_bytes=file.st_size, device=file.st_dev, inode=file.st_ino, seals=seals)


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
