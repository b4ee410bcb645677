"""Facts of memory that several processes share: `python -m tests.gpu.sharing NAME`, which starts the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gms.backends.cuda_calls import CudaError
from tests.gpu.driver import MIB, Probe, computing, created, mapped, opened
from tests.gpu.facts import PATTERN, intact
from tests.gpu.report import Fact, emit

SIZE = 8 * MIB


def maker_killed() -> None:
    """What is left of memory when the process that made it was killed: the service's death."""
    for when in ("before it is imported", "while it is mapped"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            maker = _start(make, theirs.fileno())
            (fd,) = socket.recv_fds(ours, 1, 1)[1]
            question = f"memory whose maker is killed {when}"
            with computing() as probe:
                if when == "before it is imported":
                    _kill(maker)
                    with opened(probe, fd, SIZE, writable=False) as address:
                        emit(Fact(question, intact(probe, address, SIZE), "intact"))
                else:
                    with opened(probe, fd, SIZE, writable=False) as address:
                        _kill(maker)
                        emit(Fact(question, intact(probe, address, SIZE), "intact"))
                found = _ask(look, fd)
                emit(Fact(f"the same, its descriptor handed on to a third process ({when})", found, "intact"))
                _re_export(probe, fd, when)
            os.close(fd)


def _re_export(probe: Probe, fd: int, when: str) -> None:
    """Of a handle that was imported: a service that were to export anew what was handed back to it would do so."""
    handle = probe.open(fd)
    try:
        again = probe.export(handle)
    except CudaError as error:
        emit(Fact(f"exporting an imported handle ({when})", f"refused: {probe.error_name(error.number)}"))
    else:
        emit(Fact(f"exporting an imported handle, opened by a third process ({when})", _ask(look, again)))
        os.close(again)
    finally:
        probe.release(handle)


def readers_write() -> None:
    """A write through a read-only mapping, by a copy and by a kernel. Rude."""
    with computing() as probe, created(probe, SIZE) as handle, mapped(probe, SIZE, handle, writable=True) as address:
        probe.fill(address, PATTERN, SIZE)
        probe.synchronize()
        fd = probe.export(handle)
        for way in ("copy", "kernel"):
            found = json.loads(_ask(intrude, fd, way))
            emit(Fact(f"a {way} into read-only memory", found["written"], "refused"))
            emit(Fact(f"creating memory after that {way}", found["create"]))
            emit(Fact(f"unmapping after that {way}", found["unmap"]))
        emit(Fact("the pages that readers tried to write", intact(probe, address, SIZE), "intact"))
        os.close(fd)


def late_writer() -> None:
    """Nothing can be sealed: a writable mapping made before stays writable, whatever others map. The docs say so."""
    with computing() as probe, created(probe, SIZE) as handle, mapped(probe, SIZE, handle, writable=True) as address:
        probe.fill(address, 0, SIZE)
        probe.synchronize()
        fd = probe.export(handle)
        with opened(probe, fd, SIZE, writable=False) as reader:
            probe.fill(address, PATTERN, SIZE)
            probe.synchronize()
            seen = intact(probe, reader, SIZE)
            emit(Fact("a write through an older mapping is seen by readers", str(seen == "intact")))
        os.close(fd)


# What the other processes do


def make(channel: int) -> None:
    """Makes memory with a pattern, sends its descriptor, and waits to be killed."""
    with computing() as probe, created(probe, SIZE) as handle, mapped(probe, SIZE, handle, writable=True) as address:
        probe.fill(address, PATTERN, SIZE)
        probe.synchronize()
        with socket.socket(fileno=channel) as connection:
            socket.send_fds(connection, [b"x"], [probe.export(handle)])
            connection.recv(1)


def look(fd: int) -> None:
    with computing() as probe, opened(probe, fd, SIZE, writable=False) as address:
        print(intact(probe, address, SIZE))


def intrude(fd: int, way: str) -> None:
    """May read, and then tries to write. Its context is dead afterwards: nothing can be given back."""
    probe = Probe()
    probe.use(probe.retain_context(0))
    handle, address = probe.open(fd), probe.reserve(SIZE)
    probe.map(address, SIZE, handle)
    probe.allow(0, address, SIZE, writable=False)

    def write() -> None:
        if way == "copy":
            probe.write(address, b"intruder")
        else:
            probe.fill(address, 0, SIZE)
        probe.synchronize()

    if intact(probe, address, SIZE) != "intact":
        raise RuntimeError("the pages cannot even be read")
    found = {"written": probe.outcome(write)}
    found["create"] = probe.outcome(probe.create, 0, 2 * MIB)
    found["unmap"] = probe.outcome(probe.unmap, address, SIZE)
    print(json.dumps(found))


def _start(role: Callable[..., None], fd: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.sharing", role.__name__, str(fd), *arguments]
    return subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def _ask(role: Callable[..., None], fd: int, *arguments: str) -> str:
    """What the process says; a failure if it says nothing."""
    process = _start(role, fd, *arguments)
    said, _ = process.communicate(timeout=30)
    return said.strip() or f"failed: the process ended with {process.returncode}"


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"the process had ended before with {process.returncode}")
    if process.stdout is not None:
        process.stdout.close()


CASES = {case.__name__: case for case in (maker_killed, readers_write, late_writer)}
RUDE = {"readers_write"}
ROLES = {role.__name__: role for role in (make, look, intrude)}

if __name__ == "__main__":
    if sys.argv[1] in CASES:
        CASES[sys.argv[1]]()
    else:
        ROLES[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])
