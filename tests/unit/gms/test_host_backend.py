from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gms import libc
from gms.backends import host
from gms.backends.available import Available, available
from gms.backends.base import ForeignPagesError, OutOfMemoryError, StillMappedError
from gms.backends.host import READ_BYTES, SPARE_BYTES, SPARE_SHARE, HostBackend, HostPages

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


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


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
    with pytest.raises(OutOfMemoryError, match=r"this (machine|container) has \d+ bytes left") as caught:
        backend.create("w", 1 << 48)
    assert caught.value.room_bytes is not None
    assert 0 < caught.value.room_bytes < 1 << 48


@pytest.mark.parametrize("left", [0, SPARE_BYTES, SPARE_BYTES + 5, 100 << 20, (100 << 20) + 4097])
@pytest.mark.parametrize("promised", [0, 40 << 20])
def test_the_room_that_a_refusal_speaks_of_is_there(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch, left: int, promised: int
) -> None:
    before = [backend.create("before", promised)] if promised else []
    monkeypatch.setattr(host, "available", lambda: Available(left, "this test"))
    with pytest.raises(OutOfMemoryError, match="this test has") as caught:
        backend.create("w", 200 << 20)
    room = caught.value.room_bytes
    assert room == max(0, (left - SPARE_BYTES) * SPARE_SHARE // (SPARE_SHARE + 1) - promised)
    if room:
        before.append(backend.create("w", room))
    with pytest.raises(OutOfMemoryError):
        backend.create("x", max(1, left // 100))
    for pages in before:
        backend.destroy(pages)


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


@pytest.mark.parametrize("size", [SIZE, 2 * READ_BYTES + mmap.PAGESIZE])
def test_a_digest_is_of_the_part_asked_for_and_leaves_no_mapping(backend: HostBackend, size: int) -> None:
    pages = backend.create("w", size)
    data = os.urandom(size)
    os.pwrite(pages.fd, data, 0)
    ranges = [(0, size), (0, 0), (0, 1), (1, 1), (mmap.PAGESIZE - 1, 2), (mmap.PAGESIZE, 5), (size - 3, 3)]
    ranges += [(5, size - 5), (0, min(READ_BYTES, size)), (1, min(READ_BYTES, size - 1))]
    for offset, length in ranges:
        assert backend.digest(pages, offset, length, hashlib.sha256) == sha(data[offset : offset + length])
    backend.freeze(pages)  # a shared writable mapping left behind would refuse it
    assert backend.digest(pages, 0, size, hashlib.sha256) == sha(data)
    backend.destroy(pages)


def test_there_is_no_digest_of_what_is_beyond_the_end(backend: HostBackend, pages: HostPages) -> None:
    with pytest.raises(EOFError, match=f"a chunk of {SIZE} bytes ends at {SIZE}"):
        backend.digest(pages, 1, SIZE, hashlib.sha256)


def test_a_digest_lets_other_threads_run(backend: HostBackend, pages: HostPages) -> None:
    """The hash waits for another thread, which can only come by while the interpreter's lock is free."""
    other = threading.Event()
    thread = threading.Thread(target=other.set)

    class Waits:
        def update(self, data: memoryview) -> None:
            thread.start()
            assert other.wait(10)

        def digest(self) -> bytes:
            return b"done"

    assert backend.digest(pages, 0, 1, Waits) == b"done"
    thread.join()


def test_pages_are_taken_back_by_what_the_kernel_says_of_them(backend: HostBackend) -> None:
    pages = backend.create("w", SIZE)
    os.pwrite(pages.fd, b"hello", 0)
    identity = backend.identify(pages)
    shared = backend.share(pages, writable=True)
    backend.destroy(pages)
    again = HostBackend().adopt(shared, identity)
    os.close(shared)  # the caller's own
    assert (os.pread(again.fd, 5, 0), os.get_inheritable(again.fd)) == (b"hello", False)
    assert backend.identify(again) == identity
    backend.freeze(again)
    sealed = backend.identify(again)
    assert sealed != identity
    reader = backend.share(again, writable=False)
    backend.destroy(again)
    last = HostBackend().adopt(reader, sealed)
    os.close(reader)
    third = backend.share(last, writable=False)
    assert os.read(third, 5) == b"hello"
    assert backend.digest(last, 0, 5, hashlib.sha256) == sha(b"hello")
    backend.freeze(last)
    os.close(third)
    backend.destroy(last)


def test_what_is_not_the_chunk_described_is_refused_without_damage(
    backend: HostBackend, pages: HostPages, tmp_path: Path
) -> None:
    identity = backend.identify(pages)
    with ExitStack() as stack:

        def kept(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        other = backend.create("w", SIZE)
        stack.callback(backend.destroy, other)
        file = tmp_path / "file"
        file.write_bytes(bytes(SIZE))
        ends = os.pipe()
        plain = kept(os.memfd_create("w", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(plain, mmap.PAGESIZE)
        refused = {
            kept(ends[0]): "no memory",
            kept(ends[1]): "no memory",
            kept(os.open(tmp_path, os.O_RDONLY)): "no memory",
            kept(os.open(file, os.O_RDWR)): "no memory",
            kept(os.open(f"/proc/self/fd/{pages.fd}", os.O_PATH)): "no memory",
            kept(socket.socket().detach()): "no memory",
            plain: "its size_bytes is 4096, not 16384; its inode is",
            other.fd: "its inode is",
            kept(backend.share(pages, writable=False)): "cannot be written through",
            1 << 20: "no memory",  # not open
        }
        before = len(os.listdir("/proc/self/fd"))
        for fd, reason in refused.items():
            with pytest.raises(ForeignPagesError, match=reason):
                backend.adopt(fd, identity)
        assert len(os.listdir("/proc/self/fd")) == before
        backend.freeze(pages)
        with pytest.raises(ForeignPagesError, match="its seals is"):
            backend.adopt(pages.fd, identity)


@pytest.mark.parametrize("number", [23, 24], ids=["ENFILE", "EMFILE"])
def test_out_of_descriptors_is_no_fault_of_who_hands_back(
    backend: HostBackend, pages: HostPages, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none_left(fd: int) -> int:
        raise OSError(number, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    with pytest.raises(OutOfMemoryError, match="Too many open files"):
        backend.adopt(pages.fd, backend.identify(pages))


def test_chunks_are_as_large_as_asked_for() -> None:
    assert HostBackend("cpu:1", chunk_bytes=2 * mmap.PAGESIZE).chunk_bytes == 2 * mmap.PAGESIZE
    assert HostBackend("cpu:1").device_id == "cpu:1"
    assert HostBackend().chunk_bytes == 1 << 48
    for size in (0, -mmap.PAGESIZE, mmap.PAGESIZE + 1):
        with pytest.raises(ValueError, match="multiple"):
            HostBackend(chunk_bytes=size)


# How much there is


GROUPS = {
    "v2": ("0::/a/b\n", "a/b", {"memory.max": "1000", "memory.current": "400"}, 600),
    "v2, above": ("0::/a/b\n", "a", {"memory.max": "1000", "memory.current": "400"}, 600),
    "v2, in a container": ("0::/\n", "", {"memory.max": "1000", "memory.current": "1001"}, 0),
    "v2 beside v1": ("0::/a\n", "unified/a", {"memory.max": "1000", "memory.current": "400"}, 600),
    "v2, cache": (
        "0::/\n",
        "",
        {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 300\nactive_file 200\n"},
        600,
    ),
    "v1": (
        "7:cpu,memory:/x\n0::/\n",
        "memory/x",
        {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900", "memory.stat": "total_inactive_file 500\n"},
        600,
    ),
    "v1, in a container": (
        "4:memory:/docker/far/away\n",
        "memory",
        {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "400"},
        600,
    ),
    "no limit": ("0::/\n", "", {"memory.max": "max", "memory.current": "400"}, 2048),
    "no memory controller": ("0::/\n2:cpu:/x\n", "", {}, 2048),
    "no cgroups": ("", "", {}, 2048),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_containers_limit_counts(tmp_path: Path, name: str) -> None:
    lines, folder, files, left = GROUPS[name]
    proc, mounted = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(lines)
    (proc / "meminfo").write_text("MemTotal: 4 kB\nMemFree: 1 kB\nMemAvailable:   2 kB\n")
    (mounted / folder).mkdir(parents=True)
    for file, text in files.items():
        (mounted / folder / file).write_text(text)
    found = available(proc, mounted)
    assert found == (left, "this machine" if left == 2048 else "this container")


def test_a_machine_that_does_not_say_limits_nothing(tmp_path: Path) -> None:
    assert available(tmp_path, tmp_path).size_bytes == 1 << 62
