"""``hotspare bench recovery``, small: two arms under both loads; and the end of a server that does not want to end."""

from __future__ import annotations

import asyncio
import os
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import pytest

from app.cli.bench.recovery import stock
from tests.support.machine import hotspare
from tests.support.processes import MS, gone, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def test_what_a_run_reports(tmp_path: Path) -> None:
    done = hotspare(
        *("bench", "recovery", "--engine", "sim", "--arms", "stock,keeper,shadow", "--kills", "1", "--json"),
        *("--settle-seconds", "0.7"),
        deadline_seconds=150_000 * MS,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert set(report["arms"]) == {"keeper", "shadow"}
    assert "stock" in report["skipped"]
    assert report["failed_requests"] == 0, report["problems"]
    for arm in report["arms"].values():
        for load in ("none", "streams"):
            assert arm[load]["kills"] == 1
            assert 0 < arm[load]["recovery_seconds"]["max"] < 30
        assert arm["none"]["ttft_repeat_ratio"] > 0
        shown = arm["streams"]["timeline"]
        assert sum(tokens for _, tokens in shown["tokens"]) > 50
        assert min(at for at, _ in shown["ttft"]) < 0 < max(at for at, _ in shown["ttft"])
    shadow = report["arms"]["shadow"]["none"]
    parts = ("teardown", "lock", "map", "bind", "routable", "first_token")
    whole = sum(shadow[f"{name}_seconds"]["max"] for name in parts)
    assert whole == pytest.approx(shadow["recovery_seconds"]["max"], abs=1e-4)
    assert shadow["weights_copies"] == 0


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    pathlib.Path(sys.argv[1]).write_text(str(child))
time.sleep(300)
"""


async def test_a_server_that_ignores_sigterm_goes_with_its_children_also_when_we_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "STOP_SECONDS", 200 * MS)
    server = stock.Stock(tmp_path, 1, [], os.environ)
    server._command = [sys.executable, "-c", STUBBORN, str(tmp_path / "child")]
    await server.start()

    async def measure() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()

    task = asyncio.create_task(measure())
    child = await asyncio.to_thread(until, lambda: _number(tmp_path / "child"), saying="it has a child")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(child)


LEAVES = """
import multiprocessing, pathlib, sys, time
from multiprocessing.shared_memory import SharedMemory
context = multiprocessing.get_context("spawn")
lock, memory = context.Lock(), SharedMemory(create=True, size=4096)
pathlib.Path(sys.argv[1] + ".draft").write_text(f"{memory.name} sem.{lock._semlock.name[1:]}")
pathlib.Path(sys.argv[1] + ".draft").rename(sys.argv[1])
time.sleep(300)
"""


async def test_what_a_killed_server_has_in_shared_memory_goes_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    other = SharedMemory(create=True, size=4096)
    server = stock.Stock(tmp_path, 1, [], os.environ)
    try:
        for kill in (server.kill, server.stop):
            server._command = [sys.executable, "-c", LEAVES, str(tmp_path / kill.__name__)]
            await server.start()
            await asyncio.to_thread(until, (tmp_path / kill.__name__).exists, saying="it has made them")
            left = [Path("/dev/shm", name) for name in (tmp_path / kill.__name__).read_text().split()]
            assert all(path.exists() for path in left)
            await kill()
            await server.clear_up()
            assert not any(path.exists() for path in left)
        assert other.name in os.listdir("/dev/shm")
    finally:
        await server.stop()
        other.close()
        other.unlink()


def _number(path: Path) -> int | None:
    return int(path.read_text()) if path.exists() and path.read_text() else None
