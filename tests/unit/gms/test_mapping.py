from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from gms import libc
from gms.mapping import Backing, Chunk, HostMemory, Reservation, device_memory
from gms.protocol import GmsError

PAGE = mmap.PAGESIZE
Pages = Callable[..., Chunk]


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Makes chunks of whole pages, each filled with the number given for it."""
    with ExitStack() as stack:

        def make(*numbers: int) -> Chunk:
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, b"".join(bytes([number]) * PAGE for number in numbers))
            return Chunk(fd, len(numbers) * PAGE)

        yield make


def protection(address: int) -> str:
    """The permissions of the mapping at an address, from /proc/self/maps."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, rights = line.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return rights
    return ""


def test_the_address_stays_while_the_backing_changes(pages: Pages) -> None:
    chunk = pages(0, 1, 2, 3)
    with Reservation(4 * PAGE) as range_:
        address = range_.address
        buffer = range_.buffer()
        assert (range_.backing, protection(address)) == (Backing.NONE, "---p")
        range_.map_scratch(PAGE)
        buffer[0] = 42
        assert (range_.backing, buffer[PAGE], buffer[3 * PAGE]) == (Backing.SCRATCH, 42, 42)
        range_.unmap()
        assert protection(address) == protection(address + 3 * PAGE) == "---p"
        range_.map([chunk], writable=True)
        assert (range_.backing, protection(address)) == (Backing.PAGES_RW, "rw-s")
        assert [buffer[number * PAGE] for number in range(4)] == [0, 1, 2, 3]
        buffer[0] = 9
        range_.map([chunk], writable=False)
        assert (range_.backing, protection(address), buffer[0]) == (Backing.PAGES_RO, "r--s", 9)
        assert range_.address == address
    assert protection(address) != "r--s"
    assert os.pread(chunk.fd, 1, 0) == b"\x09"


def test_chunks_stand_one_after_the_other(pages: Pages) -> None:
    chunks = [pages(7, 8), pages(5), pages(3)]
    with Reservation(5 * PAGE) as range_:
        range_.map(chunks, writable=True)
        buffer = range_.buffer()
        assert [buffer[number * PAGE] for number in range(4)] == [7, 8, 5, 3]
        assert range_.mapped_bytes == 4 * PAGE
        assert protection(range_.address + 4 * PAGE) == "---p"
        range_.unmap()
        assert all(protection(range_.address + number * PAGE) == "---p" for number in range(5))


@pytest.mark.parametrize("broken", ["short", "read-only", "closed", "no file"])
def test_on_a_failure_half_way_nothing_stays_mapped(pages: Pages, broken: str) -> None:
    good, bad = pages(1, 2), pages(3, 4)
    reader = os.open(f"/proc/self/fd/{bad.fd}", os.O_RDONLY)
    pipe = os.pipe()
    wrong = {"short": Chunk(bad.fd, 3 * PAGE), "read-only": Chunk(reader, 2 * PAGE)}
    wrong |= {"closed": Chunk(9999, 2 * PAGE), "no file": Chunk(pipe[0], 2 * PAGE)}
    try:
        with Reservation(6 * PAGE) as range_:
            range_.map([good], writable=True)
            with pytest.raises((OSError, ValueError)):
                range_.map([good, wrong[broken]], writable=True)
            assert (range_.backing, range_.mapped_bytes) == (Backing.NONE, 0)
            assert all(protection(range_.address + number * PAGE) == "---p" for number in range(6))
            range_.map([good, bad], writable=True)
            assert range_.read(3 * PAGE, 1) == b"\x04"
    finally:
        for fd in (reader, *pipe):
            os.close(fd)


def test_a_mapping_that_forks_would_inherit_is_not_left(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: int, length: int, advice: int) -> None:
        raise OSError(errno.ENOMEM, "madvise")

    with Reservation(PAGE) as range_:
        monkeypatch.setattr(libc, "madvise", refused)
        with pytest.raises(OSError, match="madvise"):
            range_.map([pages(1)], writable=True)
        assert protection(range_.address) == "---p"


@pytest.mark.parametrize(
    "sizes", [[], [0], [-PAGE], [PAGE + 1], [5 * PAGE], [4 * PAGE, PAGE], [2 * PAGE, -PAGE]], ids=str
)
def test_chunks_that_do_not_fit_are_refused(pages: Pages, sizes: list[int]) -> None:
    fd = pages(*range(5)).fd
    with Reservation(4 * PAGE) as range_:
        range_.map([Chunk(fd, PAGE)], writable=False)
        with pytest.raises(ValueError, match=r"must be multiples|do not fit"):
            range_.map([Chunk(fd, size) for size in sizes], writable=False)
        assert range_.backing is Backing.PAGES_RO  # refused before anything was touched


def test_a_chosen_address_is_taken_or_refused() -> None:
    with Reservation(PAGE) as first:
        address = first.address
        with pytest.raises(GmsError, match="is taken in this process") as caught:
            Reservation(PAGE, address=address)
        assert caught.value.code == "not_permitted"
    with Reservation(PAGE, address=address) as second:
        assert second.address == address


def test_sizes_are_whole_pages() -> None:
    with Reservation(PAGE + 1) as range_:
        assert range_.size_bytes == 2 * PAGE
        assert len(range_.buffer()) == 2 * PAGE
    with pytest.raises(ValueError, match="positive"):
        Reservation(0)


def test_scratch_of_an_odd_chunk_covers_the_end() -> None:
    with Reservation(5 * PAGE) as range_:
        range_.map_scratch(2 * PAGE)
        buffer = range_.buffer()
        buffer[PAGE - 1] = 1
        assert buffer[3 * PAGE - 1] == 1
        buffer[5 * PAGE - 1] = 2
        range_.unmap()
        assert all(protection(range_.address + number * PAGE) == "---p" for number in range(5))
    with Reservation(5 * PAGE) as range_:
        range_.map_scratch(1 << 30)
        range_.buffer()[0] = 1
        assert range_.buffer()[PAGE] == 0


def test_scratch_of_too_many_parts_is_refused() -> None:
    with Reservation(1 << 30) as range_, pytest.raises(ValueError, match="larger chunk"):
        range_.map_scratch(PAGE)


def test_a_large_reservation_costs_nothing() -> None:
    with Reservation(1 << 40) as range_:
        assert len(range_.buffer()) == 1 << 40


def test_a_closed_reservation_says_so_and_close_is_idempotent(pages: Pages) -> None:
    range_ = Reservation(4 * PAGE)
    chunk = pages(1)
    range_.map([chunk], writable=True)
    range_.close()
    range_.close()
    calls: list[Callable[[], object]] = [
        range_.unmap,
        range_.buffer,
        lambda: range_.map_scratch(PAGE),
        lambda: range_.map([chunk], writable=False),
        lambda: range_.read(0, 1),
        lambda: range_.write(0, b"x"),
        lambda: range_.digest(0, 1, hashlib.sha256),
    ]
    for call in calls:
        with pytest.raises(GmsError) as caught:
            call()
        assert caught.value.code == "closed"
    assert range_.backing is Backing.NONE


def test_a_read_only_descriptor_cannot_be_mapped_writable(pages: Pages) -> None:
    chunk = pages(1)
    reader = os.open(f"/proc/self/fd/{chunk.fd}", os.O_RDONLY)
    try:
        with Reservation(PAGE) as range_:
            with pytest.raises(PermissionError, match="mmap"):
                range_.map([Chunk(reader, PAGE)], writable=True)
            assert range_.backing is Backing.NONE
    finally:
        os.close(reader)


def test_sealed_pages_are_mapped_by_their_writer_on_older_kernels_too(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse what a writing descriptor asks for."""
    kernel = libc.mmap

    def before_6_7(address: int | None, length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
        if fd >= 0 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            raise PermissionError(errno.EPERM, "mmap: Operation not permitted")
        return kernel(address, length, protection, flags, fd, offset)

    descriptors = os.listdir("/proc/self/fd")
    with Reservation(PAGE) as range_:
        monkeypatch.setattr(libc, "mmap", before_6_7)
        chunk = pages(5)
        range_.map([chunk], writable=False)
        assert range_.read(0, 1) == b"\x05"
        with pytest.raises(PermissionError):
            range_.map([chunk], writable=True)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors) + 1  # the chunk's own


def test_contents_are_read_written_and_hashed_where_memory_is(pages: Pages) -> None:
    chunks = [pages(1), pages(2)]
    with Reservation(3 * PAGE) as range_:
        digest = partial(range_.digest, 0, 1, hashlib.sha256)
        for call in (lambda: range_.read(0, 1), lambda: range_.write(0, b"x"), digest):
            with pytest.raises(ValueError, match="are not mapped"):
                call()
        range_.map(chunks, writable=True)
        range_.write(PAGE - 2, b"abcd")
        assert range_.read(PAGE - 3, 6) == b"\x01abcd\x02"
        assert range_.digest(PAGE - 3, 6, hashlib.sha256) == hashlib.sha256(b"\x01abcd\x02").digest()
        assert range_.digest(0, 0, hashlib.sha256) == hashlib.sha256().digest()
        for offset, length in ((2 * PAGE, 1), (0, 2 * PAGE + 1), (-1, 1), (0, -1)):
            with pytest.raises(ValueError, match="are not mapped"):
                range_.digest(offset, length, hashlib.sha256)
        range_.map(chunks, writable=False)
        with pytest.raises(GmsError, match="read-only") as caught:
            range_.write(0, b"x")
        assert caught.value.code == "not_permitted"


def test_what_is_mapped_can_be_zeroed(pages: Pages) -> None:
    chunks = [pages(1), pages(2)]
    with Reservation(3 * PAGE) as range_:
        with pytest.raises(ValueError, match="are not mapped"):
            range_.clear()
        range_.map(chunks, writable=False)
        with pytest.raises(GmsError, match="read-only"):
            range_.clear()
        range_.map(chunks, writable=True)
        range_.clear()
        assert range_.read(0, 2 * PAGE) == bytes(2 * PAGE)


def test_devices_are_called_by_kind_and_number() -> None:
    memory = device_memory("cpu:3")
    assert (memory.device, memory.device_id, memory.dlpack_device) == ("cpu:3", "cpu:3", (1, 0))
    with Reservation(PAGE, memory=memory) as range_:
        assert range_.memory is memory
    assert HostMemory().device == "cpu:0"
    for name in ("cpu", "tpu:0", "cuda:", "cuda:-1", "cuda:0 ", "cpu:٣", ""):
        with pytest.raises(GmsError, match="use cpu:N or cuda:N") as caught:
            device_memory(name)
        assert caught.value.code == "wrong_device"


def test_pages_can_be_at_a_second_address(pages: Pages) -> None:
    first, second = pages(0, 1, 2), pages(3, 4)
    with Reservation(5 * PAGE) as range_, Reservation(4 * PAGE) as other:
        range_.map([first, second], writable=False)
        range_.mirror(PAGE, 4 * PAGE, other.address)  # from both chunks
        assert [ctypes.string_at(other.address + at * PAGE, 1)[0] for at in range(4)] == [1, 2, 3, 4]
        assert {protection(other.address + at * PAGE) for at in range(4)} == {"r--s"}
        assert range_.fault([first, second]) is None
        libc.mmap(
            other.address + 2 * PAGE, PAGE, libc.PROT_READ, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED
        )
        assert f"at {other.address + 2 * PAGE:#x} has the access r--p" in (range_.fault([first, second]) or "")
        range_.unmap()
        assert ctypes.string_at(other.address + 3 * PAGE, 1) == b"\4"
        with pytest.raises(ValueError, match="are not mapped"):
            range_.mirror(0, PAGE, other.address)


def test_only_whole_pages_that_are_mapped_get_a_second_address(pages: Pages) -> None:
    with Reservation(2 * PAGE) as range_, Reservation(2 * PAGE) as other:
        range_.map([pages(1)], writable=False)
        for offset, length, to in ((0, 2 * PAGE, 0), (1, PAGE - 1, 0), (0, 1, 0), (0, PAGE, 1)):
            with pytest.raises(ValueError, match=r"not mapped|no whole pages"):
                range_.mirror(offset, length, other.address + to)
        range_.map_scratch(PAGE)
        with pytest.raises(ValueError, match="scratch"):
            range_.mirror(0, PAGE, other.address)
        assert protection(other.address) == "---p"
