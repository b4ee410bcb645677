"""Promotions in a row leave nothing behind: memory, descriptors, threads, files. Fifty with HOTSPARE_TEST_LONG=1."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.process.workers.test_engine_life import Pair, _active
from tests.support.processes import gone, running, until, until_role
from workers.contract import Role
from workers.engines.sim import SimEngine
from workers.memory import MemoryService
from workers.ports import PortReservation
from workers.settings import EngineSettings, SimSettings

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

LONG = os.environ.get("HOTSPARE_TEST_LONG") == "1"
WARM_UP = 2
"""Promotions before what is there is taken for what stays: caches of the interpreter and of the allocator fill."""
PROMOTIONS = 50 if LONG else 6
START_SECONDS = 120.0
MIB = 1024 * 1024
GROWTH_BYTES = 2 * MIB
"""What an allocator may take more or less."""


class Held(msgspec.Struct, frozen=True):
    """What one process holds."""

    private_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous, threads = (re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("RssAnon", "Threads"))
        assert anonymous is not None
        assert threads is not None
        return cls(int(anonymous[1]) * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(threads[1]))

    def within(self, before: Held) -> bool:
        return (
            self.descriptors <= before.descriptors
            and self.threads <= before.threads
            and self.private_bytes < before.private_bytes + GROWTH_BYTES
        )


def until_flat(pid: int, before: Held) -> None:
    """A connection that was closed a moment ago may still be there."""
    try:
        until(lambda: Held.of(pid).within(before), saying="it holds no more than before")
    except AssertionError:
        raise AssertionError(f"{before} became {Held.of(pid)}") from None


def shared_files(pid: int) -> list[str]:
    """Of ``/dev/shm``, mapped by a process and still having a name: such a one would outlive it."""
    return re.findall(r"/dev/shm/\S+$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(3)]
        yield Pair(tmp_path, ports, stack)


@pytest.mark.parametrize(
    "engine",
    [
        "sim",
        pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.skipif(not LONG, reason="HOTSPARE_TEST_LONG=1")]),
    ],
)
def test_kills_in_a_row_leave_nothing_behind(pair: Pair, engine: str) -> None:
    pair.env["HOTSPARE_ENGINE"] = engine
    temporary = pair.run_dir / "tmp"
    temporary.mkdir()
    pair.env["TMPDIR"] = str(temporary)
    gms = pair.gms()
    keepers = {name: pair.engine(name) for name in pair.admin}
    until(lambda: _active(pair), saying="an engine is active", seconds=START_SECONDS)
    folder = pair.run_dir / "pod-0"
    spares: list[Held] = []

    def kill_and_replace() -> None:
        name, active = until(lambda: _active(pair), saying="an engine is active")
        other = "b" if name == "a" else "a"
        spares.append(Held.of(until_role(pair.admin[other], Role.STANDBY, seconds=START_SECONDS)["pid"]))
        pair.complete()
        pid = active["pid"]
        assert isinstance(pid, int)
        assert shared_files(pid) == []
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        until_role(pair.admin[other], Role.ACTIVE)
        until_role(pair.admin[name], Role.STANDBY, seconds=START_SECONDS)

    for _ in range(WARM_UP):
        kill_and_replace()
    processes = {"gms": gms.pid, **{name: keeper.pid for name, keeper in keepers.items()}}
    before = {name: Held.of(pid) for name, pid in processes.items()}
    entries, files = len(list(folder.rglob("*"))), sorted(temporary.rglob("*"))
    for _ in range(PROMOTIONS):
        kill_and_replace()
    for name, pid in processes.items():
        until_flat(pid, before[name])
    # Each was looked at once, and a connection that was closed a moment before may have been there still.
    assert any(spare.within(spares[WARM_UP]) for spare in spares[-3:]), spares
    until(lambda: len(list(folder.rglob("*"))) <= entries, saying="the pod's folder has as many files as before")
    assert sorted(temporary.rglob("*")) == files
    print(f"{engine}: {PROMOTIONS} kills: {before} became { {name: Held.of(pid) for name, pid in processes.items()} }")


async def test_waking_and_parking_in_a_row_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "gms.sock"
    with running("gms", "gms", "--socket", str(path), log_dir=tmp_path) as gms:
        until(path.exists, saying="the memory service's socket")
        service = MemoryService(socket=str(path), device="cpu:0", engine="a", instance="flat", timeout_seconds=10)
        settings = EngineSettings(engine="sim", sim=SimSettings(weights_bytes=MIB, kv_bytes=16 * MIB))
        engine = SimEngine(settings, service, tmp_path)
        await engine.initialize()
        try:
            before: dict[int, Held] = {}
            for epoch in range(1, WARM_UP + PROMOTIONS + 1):
                await engine.self_test()
                await engine.wake(epoch=epoch)
                assert engine.memory().kv_mapped
                await engine.park()
                assert not engine.memory().kv_mapped
                if epoch == WARM_UP:
                    before = {pid: Held.of(pid) for pid in (os.getpid(), gms.pid)}
            for pid, held in before.items():
                until_flat(pid, held)
        finally:
            await engine.shutdown()
