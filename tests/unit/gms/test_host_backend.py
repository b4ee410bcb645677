from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from gms import libc
from gms.backends import host
from gms.backends.base import OutOfMemoryError, StillMappedError
from gms.backends.host import HostBackend, HostPages

SIZE = 4 * mmap.PAGESIZE


@pytest.fixture
def backend() -> HostBackend:
    return HostBackend()


@pytest.fixture
def pages(backend: HostBackend) -> Iterator[HostPages]:
    pages = backend.create("w", SIZE)
    yield pages
    backend.destroy(pages)


def seals(pages: HostPages) -> int:
    return fcntl.fcntl(pages.fd, fcntl.F_GET_SEALS)


def resident(pages: HostPages) -> int:
    return os.fstat(pages.fd).st_blocks * 512


def test_the_size_is_sealed_and_the_pages_are_not_there_yet(backend: HostBackend, pages: HostPages) -> None:
    assert seals(pages) & (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK) == fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    assert not seals(pages) & (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    assert not os.get_inheritable(pages.fd)
    assert resident(pages) == 0
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(pages.fd, size)


def test_populating_puts_memory_behind_the_part_asked_for(backend: HostBackend, pages: HostPages) -> None:
    backend.populate(pages, mmap.PAGESIZE, 2 * mmap.PAGESIZE)
    assert resident(pages) == 2 * mmap.PAGESIZE
    backend.populate(pages, 0, SIZE)
    assert resident(pages) == SIZE
    assert os.pread(pages.fd, SIZE, 0) == bytes(SIZE)


def test_a_kernel_without_populate_still_allocates(
    backend: HostBackend, pages: HostPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_kernel(address: int, length: int, advice: int) -> None:
        raise OSError(22, "madvise: Invalid argument")

    monkeypatch.setattr(libc, "madvise", old_kernel)
    backend.populate(pages, 0, SIZE)
    assert resident(pages) == SIZE


@pytest.mark.parametrize("number", [12, 14, 28], ids=["ENOMEM", "EFAULT", "ENOSPC"])
def test_no_room_is_out_of_memory(
    backend: HostBackend, pages: HostPages, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(address: int, length: int, advice: int) -> None:
        raise OSError(number, "madvise: full")

    monkeypatch.setattr(libc, "madvise", full)
    with pytest.raises(OutOfMemoryError):
        backend.populate(pages, 0, SIZE)


def test_more_than_the_machine_has_is_refused_at_once(backend: HostBackend) -> None:
    with pytest.raises(OutOfMemoryError, match="are available"):
        backend.create("w", 1 << 48)


def test_out_of_descriptors_is_out_of_memory(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(host, "_memfd", none_left)
    with pytest.raises(OutOfMemoryError, match="Too many open files"):
        backend.create("w", SIZE)


def test_freezing_is_final_and_repeatable(backend: HostBackend, pages: HostPages) -> None:
    writer = backend.share(pages, writable=True)
    os.pwrite(writer, b"hello", 0)
    backend.freeze(pages)
    backend.freeze(pages)
    with pytest.raises(PermissionError):
        os.pwrite(writer, b"again", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    reader = backend.share(pages, writable=False)
    assert fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert os.read(reader, 5) == b"hello"
    for fd in (writer, reader):
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_freezing_mapped_pages_is_refused(backend: HostBackend, pages: HostPages) -> None:
    mapping = mmap.mmap(pages.fd, SIZE)
    with pytest.raises(StillMappedError):
        backend.freeze(pages)
    mapping.close()
    backend.freeze(pages)
