"""In which order a killed process lets go: `python -m tests.gpu.deaths SIZE`.

An engine's heir may have the lock, the proof of death and the room that the dead one leaves at different times. Three
clocks run from one SIGKILL: the lock is free, the pidfd is readable, the memory is free.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.gpu.driver import Probe, computing, created, mapped
from tests.gpu.report import Duration, Fact, emit, size

PATIENCE_SECONDS = 20.0


def watch(size_bytes: int) -> None:
    """Kills an engine that took its lock before any call of the driver, as ours do, and one that took it after."""
    with tempfile.TemporaryDirectory(prefix="gpu-deaths-") as folder, computing() as probe:
        for order in ("before", "after"):
            lock = Path(folder) / order
            lock.touch()
            found = _kill_one(probe, lock, order, size_bytes)
            what = f"the engine had {size(size_bytes)} and took its lock {order} the GPU"
            for event, seconds in found.items():
                emit(Duration(f"SIGKILL → {event}: {what}", seconds * 1e3))
            for event in ("lock free", "pidfd readable"):
                found_order = "after" if found[event] >= found["memory free"] else "before"
                emit(Fact(f"{event} before or after the memory is: {what}", found_order))


def _kill_one(probe: Probe, lock: Path, order: str, size_bytes: int) -> dict[str, float]:
    """Seconds from the SIGKILL to each event."""
    before = probe.free_bytes()
    command = [sys.executable, "-m", "tests.gpu.deaths", "engine", str(lock), order, str(size_bytes)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as engine:
        try:
            if engine.stdout is None or engine.stdout.readline() != b"ready\n":
                raise RuntimeError("the engine did not start")
            taken = before - probe.free_bytes()
            if taken < size_bytes:
                raise RuntimeError(f"the engine has only {taken} of {size_bytes} bytes")
            found: dict[str, float] = {}
            pidfd = os.pidfd_open(engine.pid)
            heir = os.open(lock, os.O_RDWR)

            def await_lock() -> None:
                fcntl.flock(heir, fcntl.LOCK_EX)
                found["lock free"] = time.monotonic()

            def await_end() -> None:
                select.select([pidfd], [], [], PATIENCE_SECONDS)
                found["pidfd readable"] = time.monotonic()

            threads = [threading.Thread(target=wait, daemon=True) for wait in (await_lock, await_end)]
            for thread in threads:
                thread.start()
            killed = time.monotonic()
            engine.kill()
            while before - probe.free_bytes() > taken // 10:
                if time.monotonic() > killed + PATIENCE_SECONDS:
                    raise RuntimeError(f"the memory is still not free after {PATIENCE_SECONDS:g} s")
            found["memory free"] = time.monotonic()
            for thread in threads:
                thread.join(PATIENCE_SECONDS)
            os.close(heir)
            os.close(pidfd)
        finally:
            engine.kill()
    return {event: found[event] - killed for event in ("lock free", "pidfd readable", "memory free")}


def engine(lock: str, order: str, size_bytes: int) -> None:
    if order == "before":
        fd = _lock(lock)
    with (
        computing() as probe,
        created(probe, size_bytes) as handle,
        mapped(probe, size_bytes, handle, writable=True) as address,
    ):
        probe.fill(address, 1, size_bytes)
        probe.synchronize()
        if order == "after":
            fd = _lock(lock)
        os.write(1, b"ready\n")
        sys.stdin.read()
    os.close(fd)


def _lock(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        watch(int(sys.argv[1]))
