"""Facts of the driver, read off in one process each: `python -m tests.gpu.facts NAME`."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.gpu.driver import MIB, Probe, computing, created, mapped, opened, reserved
from tests.gpu.report import Duration, Fact, emit

PATTERN = 0x5A


def no_context(size_bytes: int) -> None:
    """What the service does, which has no context."""
    probe = Probe()
    handle = probe.create(0, size_bytes)
    fd = probe.export_raw(handle)
    emit(Fact("close-on-exec of an exported descriptor", str(bool(fcntl.fcntl(fd, fcntl.F_GETFD)))))
    emit(Fact("what an exported descriptor is", os.readlink(f"/proc/self/fd/{fd}")))
    again = probe.open(fd)
    emit(Fact("create, export and import without a context", "done", "done"))
    emit(Fact("the context of a process that did that", "none" if not probe.context() else "one", "none"))
    emit(Fact("what nvidia-smi counts for it", _counted()))
    os.close(fd)
    probe.release(again)
    probe.release(handle)


def identity(size_bytes: int) -> None:
    """Devices are matched by what they are."""
    probe = Probe()
    emit(Fact("the UUID is one of those that nvidia-smi lists", _listed(probe.uuid(0))))


def whole_handles(size_bytes: int) -> None:
    """What `Reservation` does: mappings that adjoin, one call for their access, one handle again and again."""
    size = 2 * MIB
    with computing() as probe, reserved(probe, 3 * size) as address:
        with created(probe, size) as handle:
            for at in (address, address + size):
                probe.map(at, size, handle)
        emit(Fact("one handle mapped twice, then released", "done", "done"))
        probe.allow(0, address, 2 * size, writable=True)
        emit(Fact("one set-access over two mappings", "done", "done"))
        probe.fill(address, PATTERN, size)
        probe.synchronize()
        same = probe.bytes_at(address + 2 * size - 4, 4) == bytes([PATTERN]) * 4
        emit(Fact("what is written through one mapping is read through the other", str(same), "True"))
        for at in (address, address + size):
            probe.unmap(at, size)
        with created(probe, size) as handle:
            probe.map(address, size, handle)
            probe.unmap(address, size)
            probe.map(address, size, handle)
            probe.allow(0, address, size, writable=False)
            probe.unmap(address, size)
        emit(Fact("mapped again where something else was mapped before", "done", "done"))


def parts(size_bytes: int) -> None:
    """What the code never does. Rude."""
    probe = Probe()
    size = 2 * MIB
    handle, double = probe.create(0, size), probe.create(0, 2 * size)
    with _experiment(probe, size) as address:
        emit(Fact("mapping a part of a handle", probe.outcome(probe.map, address, size, double)))
    with _experiment(probe, size) as address:
        emit(Fact("mapping more than a handle has", probe.outcome(probe.map, address, 2 * size, handle), "refused"))
    with _experiment(probe, size) as address:
        probe.map(address, 2 * size, double)
        emit(Fact("unmapping a part of a mapping", probe.outcome(probe.unmap, address, size)))
    with _experiment(probe, size) as address:
        probe.map(address, size, handle)
        probe.map(address + size, size, handle)
        emit(Fact("one unmap over two mappings", probe.outcome(probe.unmap, address, 2 * size)))
    with _experiment(probe, size) as address:
        probe.map(address, size, handle)
        emit(Fact("mapping over a mapping", probe.outcome(probe.map, address, size, handle), "refused"))
        found = probe.outcome(probe.allow, 0, address, 2 * size, writable=True)
        emit(Fact("set-access over more than is mapped", found))
        emit(Fact("giving back addresses that are mapped", probe.outcome(probe.free, address, 2 * size)))
    emit(Fact("creating 3 MiB", probe.outcome(probe.create, 0, 3 * MIB)))
    emit(Fact("reserving 3 MiB", probe.outcome(probe.reserve, 3 * MIB)))


@contextmanager
def _experiment(probe: Probe, size_bytes: int) -> Iterator[int]:
    """Addresses for two mappings of a size. Whatever is left in them is taken away, as far as that can be done."""
    address = probe.reserve(2 * size_bytes)
    yield address
    if probe.outcome(probe.unmap, address, 2 * size_bytes) != "done":
        for at in (address, address + size_bytes):
            probe.outcome(probe.unmap, at, size_bytes)
    probe.outcome(probe.free, address, 2 * size_bytes)


def addresses(size_bytes: int) -> None:
    """Reservations: where, and how much."""
    probe = Probe()
    with reserved(probe, 4 * MIB) as address:
        pass
    with reserved(probe, 4 * MIB, wish=address) as second:
        emit(Fact("a free address that was wished for is given", str(second == address)))
        with reserved(probe, 4 * MIB, wish=address) as third:
            emit(Fact("an address that is taken is not given again", str(third != address), "True"))
    started = time.monotonic()
    with reserved(probe, 1 << 40):
        emit(Fact("reserving 1 TiB of addresses", "done"))
    emit(Duration("reserving 1 TiB of addresses, and giving them back", (time.monotonic() - started) * 1e3))


def handles(size_bytes: int) -> None:
    """How often a handle is to be released, and what keeps memory."""
    size = size_bytes
    with computing() as probe:
        before = probe.free_bytes()
        handle = probe.create(0, size)
        fd = probe.export(handle)
        with mapped(probe, size, handle, writable=True) as address:
            probe.fill(address, PATTERN, size)
            probe.synchronize()
        first, second = probe.open(fd), probe.open(fd)
        emit(Fact("importing twice gives two handles", str(first != second)))
        released = {probe.outcome(probe.release, each) for each in (first, second, handle)}
        emit(Fact("one release for the creation, one for each import", ", ".join(sorted(released)), "done"))
        emit(Fact("a descriptor alone keeps the memory", str(_taken(probe, before, size)), "True"))
        kept = os.dup(fd)
        os.close(fd)
        with opened(probe, kept, size, writable=False) as address:
            emit(Fact("what a kept descriptor gives", intact(probe, address, size), "intact"))
        with reserved(probe, size) as address:
            again = probe.open(kept)
            os.close(kept)
            probe.map(address, size, again)
            probe.release(again)
            probe.allow(0, address, size, writable=False)
            emit(Fact("a mapping alone keeps the memory", intact(probe, address, size), "intact"))
            probe.unmap(address, size)
        started = time.monotonic()
        while _taken(probe, before, size) and time.monotonic() < started + 5:
            pass
        emit(Fact("with the last of all gone the memory is free", str(not _taken(probe, before, size)), "True"))


def foreign(size_bytes: int) -> None:
    """What a client might hand back instead of memory of a GPU."""
    probe = Probe()
    memory_file = os.memfd_create("not-a-gpu")
    os.ftruncate(memory_file, 2 * MIB)
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDWR)
    strangers = {"memfd": memory_file, "pipe": reader, "socket": ours.fileno(), "/dev/null": null}
    for name, fd in strangers.items():
        emit(Fact(f"importing a descriptor of a {name}", probe.outcome(probe.open, fd), "refused"))
    for fd in (memory_file, reader, writer, null):
        os.close(fd)
    ours.close()
    theirs.close()
    emit(Fact("importing a closed descriptor", probe.outcome(probe.open, null), "refused"))
    with created(probe, 2 * MIB):
        emit(Fact("the driver works on after that", "done", "done"))


def unmapped(size_bytes: int) -> None:
    """An access to a parked range, by a copy or by a kernel. Rude, and the last that a context does."""
    for way in ("copy", "kernel"):
        subprocess.run([sys.executable, "-m", "tests.gpu.facts", "touch", way], check=True)  # it speaks for itself


def touch(way: str) -> None:
    """Touches what is mapped, unmaps it, and touches it again."""
    probe = Probe()
    probe.use(probe.retain_context(0))
    address = probe.reserve(2 * MIB)

    def access() -> None:
        if way == "copy":
            probe.bytes_at(address, 4)
        else:
            probe.fill(address, PATTERN, 2 * MIB)
        probe.synchronize()

    with created(probe, 2 * MIB) as handle:
        probe.map(address, 2 * MIB, handle)
    probe.allow(0, address, 2 * MIB, writable=True)
    access()
    probe.unmap(address, 2 * MIB)
    emit(Fact(f"a {way} at addresses whose memory was taken away", probe.outcome(access), "refused"))
    emit(Fact(f"creating memory after that {way}", probe.outcome(probe.create, 0, 2 * MIB)))
    emit(Fact(f"giving addresses back after that {way}", probe.outcome(probe.free, address, 2 * MIB)))


def fresh(size_bytes: int) -> None:
    """Whether new memory shows what was in it before."""
    size = size_bytes
    found = []
    with computing() as probe:
        for _ in range(2):
            with created(probe, size) as handle, mapped(probe, size, handle, writable=True) as address:
                found.append("zero" if not any(probe.bytes_at(address + size // 2, 1 << 16)) else "not zero")
                probe.fill(address, 0xA5, size)
                probe.synchronize()
    emit(Fact("new memory, and new memory after some was used", ", ".join(found)))


def contexts(size_bytes: int) -> None:
    """What a context costs."""
    started = time.monotonic()
    probe = Probe()
    emit(Duration("cuInit in a new process, a GPU in use elsewhere", (time.monotonic() - started) * 1e3))
    started = time.monotonic()
    context = probe.retain_context(0)
    emit(Duration("making the primary context", (time.monotonic() - started) * 1e3))
    with probe.current(context):
        emit(Duration("reading how much is free", _mean_milliseconds(probe)))
    probe.release_context(0)


def forked(size_bytes: int) -> None:
    """CUDA in the child of a process that uses it. Rude."""
    probe = Probe()
    pid = os.fork()
    if pid == 0:
        probe._owner = os.getpid()  # past our own guard, to see the driver's answer
        found = probe.outcome(probe.create, 0, 2 * MIB)
        emit(Fact("creating memory in a forked child", found))
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    in_time = select.select([pidfd], [], [], 10.0)[0]
    os.close(pidfd)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    emit(Fact("the forked child's end", str(os.waitstatus_to_exitcode(status)) if in_time else "it hung"))


def intact(probe: Probe, address: int, size_bytes: int) -> str:
    """Whether the pattern is there, at both ends."""
    ends = probe.bytes_at(address, 4096), probe.bytes_at(address + size_bytes - 4096, 4096)
    return "intact" if set(ends) == {bytes([PATTERN]) * 4096} else f"changed: {ends[0][:4].hex()} {ends[1][:4].hex()}"


def _taken(probe: Probe, before: int, size_bytes: int) -> bool:
    """Others may use the GPU a little meanwhile."""
    return probe.free_bytes() < before - size_bytes // 2


def _mean_milliseconds(probe: Probe) -> float:
    started = time.monotonic()
    for _ in range(100):
        probe.free_bytes()
    return (time.monotonic() - started) * 10


def _counted() -> str:
    rows = _nvidia_smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    if rows is None:
        return "there is no nvidia-smi"
    mine = [row for row in rows if row.split(",")[0].strip() == str(os.getpid())]
    return mine[0].partition(",")[2].strip() if mine else "nothing under this pid"


def _listed(uuid: str) -> str:
    rows = _nvidia_smi("-L")
    return "there is no nvidia-smi" if rows is None else str(any(uuid in row for row in rows))


def _nvidia_smi(*arguments: str) -> list[str] | None:
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.splitlines()


CASES = {
    case.__name__: case
    for case in (
        no_context,
        identity,
        whole_handles,
        parts,
        addresses,
        handles,
        foreign,
        unmapped,
        fresh,
        contexts,
        forked,
    )
}
RUDE = {"parts", "unmapped", "forked"}

if __name__ == "__main__":
    if sys.argv[1] == "touch":
        touch(sys.argv[2])
    else:
        CASES[sys.argv[1]](int(sys.argv[2]))
