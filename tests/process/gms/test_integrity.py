"""What was committed stays what it was: on the host nobody can change it, on a GPU whoever does is found out."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gms.client import GmsClient, GmsError, Lease, LeaseMode
from gms.manifest import Manifest, Slot
from gms.mapping import Reservation
from tests.process.gms.bench import Agent, Bench, Device
from tests.process.gms.conftest import PRELUDE
from tests.process.gms.processes import Process

pytestmark = pytest.mark.process

SIZE = 4 * mmap.PAGESIZE
CONTENT = bytes(range(256)) * (SIZE // 256)
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 1, 2, 16
MADV_REMOVE = 9
REFUSED = "Operation not permitted|Permission denied|Bad (file descriptor|address)|I.* error|Invalid|not supported"
TRACER = """
import ctypes, os, sys
ATTACH, DETACH, POKE = 16, 17, 5
libc = ctypes.CDLL(None, use_errno=True)
pid, address = int(sys.argv[1]), ctypes.c_void_p(int(sys.argv[2]))
if libc.ptrace(ATTACH, pid, None, None) == 0:
    os.waitpid(pid, 0)
    ctypes.set_errno(0)
    libc.ptrace(POKE, pid, address, ctypes.c_void_p(0x78))
number = ctypes.get_errno()
libc.ptrace(DETACH, pid, None, None)
print(number)
"""
STORER = f"""
import ctypes
from gms.mapping import *
pages = connect().attach("weights/w", LeaseMode.RO).export("w")
place = mapped(pages, writable=False)
say(place.read(0, {SIZE}) == bytes(range(256)) * ({SIZE} // 256))
ctypes.memset(place.address, 0, 1)
say("written")
"""


class Reader:
    """Everything that a reader has, and what the writer had: its descriptor is still open."""

    def __init__(self, path: Path, service: Process, stack: ExitStack) -> None:
        self.path = path
        self.service = service
        client = stack.enter_context(GmsClient.connect(path, engine="a", instance="test"))
        self.lease: Lease = client.attach("weights/w", LeaseMode.RW)
        pages = stack.enter_context(self.lease.allocate("w", SIZE))
        place = stack.enter_context(Reservation(SIZE))
        place.map(pages.chunks, writable=True)
        place.write(0, CONTENT)
        place.unmap()
        self.lease.commit(b"")
        self.writers_fd = pages.fd
        self.fd = stack.enter_context(self.lease.export("w")).fd
        client.status()  # when it answers this, the service has closed the descriptor that it sent
        place.map(pages.chunks, writable=False)
        self.place = place
        self.address = place.address

    def content(self) -> bytes:
        return os.pread(self.fd, SIZE, 0)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    path = tmp_path_factory.mktemp("gms") / "s"
    service = Process(["-m", "gms", "--socket", str(path)], {"HOTSPARE_GMS_LOG_LEVEL": "error"}, "stderr")
    try:
        with ExitStack() as stack:
            yield Reader(path, service, stack)
    finally:
        service.close()


def checked(result: int) -> int:
    """Raises the OSError of a libc call that failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@contextmanager
def reopened(fd: int, flags: int) -> Iterator[int]:
    again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        yield again
    finally:
        os.close(again)


@contextmanager
def a_full_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x" * 100)
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def splice(fd: int) -> None:
    with a_full_pipe() as pipe:
        checked(LIBC.splice(pipe, None, fd, ctypes.byref(ctypes.c_longlong(0)), ctypes.c_size_t(100), 0))


def send_file(fd: int) -> None:
    with open("/proc/self/exe", "rb") as source:
        os.sendfile(fd, source.fileno(), 0, 100)


def copy_range(fd: int) -> None:
    source = os.memfd_create("source")
    try:
        os.write(source, b"x" * 100)
        os.copy_file_range(source, fd, 100, 0, 0)
    finally:
        os.close(source)


def shared_writable(fd: int) -> None:
    mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()


def fallocate(fd: int, mode: int) -> None:
    checked(LIBC.fallocate(fd, mode, ctypes.c_longlong(0), ctypes.c_longlong(SIZE)))


WAYS: dict[str, Callable[[int], object]] = {
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "writev": lambda fd: os.pwritev(fd, [b"x"], 0),
    "splice": splice,
    "sendfile": send_file,
    "copy_file_range": copy_range,
    "mmap": shared_writable,
    "ftruncate to less": lambda fd: os.ftruncate(fd, 0),
    "ftruncate to more": lambda fd: os.ftruncate(fd, 2 * SIZE),
    "fallocate": lambda fd: os.posix_fallocate(fd, 0, 2 * SIZE),
    "punch a hole": lambda fd: fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE),
    "zero a range": lambda fd: fallocate(fd, FALLOC_ZERO_RANGE),
    "more seals": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW),
}
FDS: dict[str, Callable[[Reader, ExitStack], int]] = {
    "the reader's": lambda reader, stack: reader.fd,
    "the reader's, reopened": lambda reader, stack: stack.enter_context(reopened(reader.fd, os.O_RDWR)),
    "the writer's": lambda reader, stack: reader.writers_fd,
    "the service's": lambda reader, stack: stack.enter_context(the_services(reader)),
}


@contextmanager
def the_services(reader: Reader) -> Iterator[int]:
    """Its own descriptor, through /proc: for who may look into the service's process."""
    folder = f"/proc/{reader.service.pid}/fd"
    found = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if "memfd:gms" in os.readlink(f"{folder}/{name}"):
                found.append(name)
    (name,) = found
    fd = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("whose", FDS)
@pytest.mark.parametrize("way", WAYS)
def test_no_descriptor_writes_what_is_committed(reader: Reader, whose: str, way: str) -> None:
    with ExitStack() as stack:
        fd = FDS[whose](reader, stack)
        with pytest.raises(OSError, match=REFUSED):
            WAYS[way](fd)
    assert reader.content() == CONTENT


def test_a_reopening_that_truncates(reader: Reader) -> None:
    with pytest.raises(PermissionError), reopened(reader.fd, os.O_RDWR | os.O_TRUNC):
        pass
    assert reader.content() == CONTENT


def process_vm_writev(reader: Reader) -> None:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source = ctypes.create_string_buffer(b"x" * 100)
    here, there = Vector(ctypes.addressof(source), 100), Vector(reader.address, 100)
    checked(LIBC.process_vm_writev(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def through_proc_mem(reader: Reader) -> None:
    """What a debugger uses: it writes even where a process may only read, if the mapping may become writable."""
    fd = os.open("/proc/self/mem", os.O_RDWR)
    try:
        os.pwrite(fd, b"x", reader.address)
    finally:
        os.close(fd)


def by_ptrace(reader: Reader) -> None:
    """As a debugger does, from another process."""
    done = subprocess.run(
        [sys.executable, "-c", TRACER, str(os.getpid()), str(reader.address)],
        capture_output=True,
        text=True,
        check=True,
    )
    if number := int(done.stdout):
        raise OSError(number, os.strerror(number))


MEMORY_WAYS: dict[str, Callable[[Reader], object]] = {
    "mprotect": lambda reader: checked(LIBC.mprotect(ctypes.c_void_p(reader.address), ctypes.c_size_t(SIZE), 3)),
    "madvise remove": lambda reader: checked(
        LIBC.madvise(ctypes.c_void_p(reader.address), ctypes.c_size_t(SIZE), MADV_REMOVE)
    ),
    "process_vm_writev": process_vm_writev,
    "/proc/PID/mem": through_proc_mem,
    "ptrace": by_ptrace,
}


@pytest.mark.parametrize("way", MEMORY_WAYS)
def test_no_mapping_writes_what_is_committed(reader: Reader, way: str) -> None:
    with pytest.raises(OSError, match=REFUSED):
        MEMORY_WAYS[way](reader)
    assert reader.place.read(0, SIZE) == CONTENT


def test_a_plain_store_is_a_fault_of_the_process_that_tries(reader: Reader, spawn: Callable[..., Process]) -> None:
    other = spawn(["-c", PRELUDE + STORER, str(reader.path)])
    assert other.line() == "True"
    assert other.wait() == -signal.SIGSEGV
    assert reader.content() == CONTENT


def test_a_private_copy_is_private(reader: Reader) -> None:
    with mmap.mmap(reader.fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as copy:
        copy[:5] = b"mine!"
    assert reader.content() == CONTENT


def test_after_all_that_the_checksums_match(reader: Reader) -> None:
    assert reader.lease.verify() == SIZE


# A GPU's memory cannot be sealed: there the readers' digests are compared


@pytest.fixture
def bench(gpu: Device) -> Iterator[Bench]:
    with Bench(gpu, "--chunk-size", str(gpu.unit)) as made:
        yield made


UNIT = 2 << 20
POOL = "weights/w"


def slot(offset: int, size_bytes: int) -> Slot:
    return Slot(offset=offset, size_bytes=size_bytes, shape=(size_bytes,), stride=(1,), storage_offset=0, dtype="uint8")


MANIFEST = Manifest(
    tag="w",
    size_bytes=3 * UNIT,
    parameters={
        "embedding.weight": slot(0, 4096),
        "layers.0.weight": slot(UNIT + 4096, 4096),
        "layers.1.weight": slot(UNIT + 8192, 100),
    },
    buffers={"rope": slot(2 * UNIT, UNIT)},
    aliases={},
).encode()


def readers(bench: Bench) -> tuple[Agent, Agent]:
    """Of what a third one committed, which is gone."""
    writer = bench.agent("w")
    writer.write_weights(POOL, "tensors", size_bytes=3 * UNIT, manifest=MANIFEST.decode("latin-1"))
    found = bench.agent("a"), bench.agent("b")
    for agent in found:
        agent.do("attach", pool=POOL, mode="ro")
        agent.read_weights(POOL, 1)
        assert agent.do("verify", pool=POOL) == 3 * UNIT
    writer.kill()
    return found


def spoil(agent: Agent, offset: int) -> None:
    """As a stray kernel of a process that maps the pages writable would."""
    agent.do("map", pool=POOL, tag="w", writable=True)
    byte = agent.do("read", pool=POOL, tag="w", offset=offset, length=1)
    agent.do("write", pool=POOL, tag="w", offset=offset, text=chr(ord(byte) ^ 1))


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        (0, "tensor 'embedding.weight'"),
        (UNIT + 4096, "tensor 'layers.0.weight'"),
        (UNIT + 8192 + 99, "tensor 'layers.1.weight'"),
        (2 * UNIT + 1, "tensor 'rope'"),
        (UNIT + 1, f"bytes {UNIT} to {UNIT + 4096} of 'w'"),
    ],
)
def test_a_changed_tensor_is_named_and_nobody_gets_it_any_more(bench: Bench, offset: int, name: str) -> None:
    culprit, reader = readers(bench)
    spoil(culprit, offset)
    with pytest.raises(GmsError, match=f"the content of {name} is not what was committed") as caught:
        reader.do("verify", pool=POOL)
    assert (caught.value.code, caught.value.retryable) == ("corrupt", False)
    bench.until_pool(POOL, lambda pool: not pool.leases)  # who reads it is cut off, the one that asked after its answer
    found = bench.pool(POOL)
    assert found is not None
    assert name in found.corrupt
    assert (found.state, found.bytes) == ("EMPTY", 0)
    with bench.connect() as client:
        with pytest.raises(GmsError, match=f"{name}.*Attach as rw_or_ro to write it anew") as caught:
            client.attach(POOL, LeaseMode.RO)
        assert caught.value.code == "corrupt"
        assert "corrupt" in [event.kind for event in client.events().events if event.pool == POOL]


def test_what_is_corrupt_is_written_anew_and_old_readers_hear_of_it_when_they_come_back(bench: Bench) -> None:
    culprit, reader = readers(bench)
    spoil(culprit, UNIT + 4096)
    with pytest.raises(GmsError):
        reader.do("verify", pool=POOL)
    writer = bench.agent("c")
    assert writer.do("attach", pool=POOL, mode="rw_or_ro")["mode"] == "rw"
    waiting = bench.agent("d")
    waiting.ask("attach", pool=POOL, mode="rw_or_ro")
    bench.until_pool(POOL, lambda pool: pool.waiting == 1)
    writer.do("allocate", pool=POOL, tag="w", size_bytes=3 * UNIT)
    writer.do("map", pool=POOL, tag="w", writable=True)
    writer.do("write", pool=POOL, tag="w", offset=0, text="anew")
    writer.do("commit", pool=POOL, manifest=MANIFEST.decode("latin-1"))
    assert waiting.answer()["mode"] == "ro"
    assert waiting.read_weights(POOL, 4) == "anew"
    assert waiting.do("verify", pool=POOL) == 3 * UNIT
    assert reader.do("read", pool=POOL, tag="w", offset=0, length=7) == "tensors"  # a mapping is not taken away
    for agent in (culprit, reader):
        with pytest.raises(GmsError) as caught:
            agent.do("release", pool=POOL)
        assert caught.value.code == "service_gone"
    found = bench.pool(POOL)
    assert found is not None
    assert (found.state, found.corrupt, found.bytes) == ("READ", "", 3 * UNIT)


def test_what_was_changed_while_the_service_was_away_is_found(bench: Bench) -> None:
    """The journal has the digests; the pages come back on their holder's word, and the first who looks sees it."""
    culprit, _ = readers(bench)
    with bench.connect("a") as client:
        lease = client.attach(POOL, LeaseMode.RO)
        with lease.export("w") as pages:
            bench.service.kill()
            spoil(culprit, 2 * UNIT)
            bench.start("--chunk-size", str(UNIT))
            with bench.connect("a") as again:
                again.adopt(POOL, generation=lease.generation, mode=LeaseMode.RO, epoch=0, allocations=[pages])
                reader = bench.agent("c")
                assert reader.do("attach", pool=POOL, mode="ro")["manifest"] == MANIFEST.decode("latin-1")
                reader.read_weights(POOL, 1)
                with pytest.raises(GmsError, match="the content of tensor 'rope'") as caught:
                    reader.do("verify", pool=POOL)
                assert caught.value.code == "corrupt"


def test_digests_that_do_not_fit_are_an_error_of_who_sends_them(bench: Bench) -> None:
    """Too few of them say nothing about the memory; but what cannot be vouched for is not given out either."""
    readers(bench)
    with bench.connect() as client:
        lease = client.attach(POOL, LeaseMode.RO)
        with pytest.raises(GmsError) as caught:
            lease.verify(digests={"other": [b"1234"]})
        assert caught.value.code == "invalid"
        assert bench.pool(POOL).corrupt == ""  # type: ignore[union-attr]
