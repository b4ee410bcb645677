"""A rank that outlives rank 0, as one that the kernel cannot end at once may: nobody is elected before it is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gms.client import GmsClient
from tests.process.workers.crews import Crew, crew
from tests.support.processes import gone, until, until_role

pytestmark = pytest.mark.process

UNTIED = """
import ctypes, os, signal, sys
from workers import factory
from workers.engines.sim.ranks import SimRank
from workers.logs import configure_logging
from workers.settings import EngineSettings

attach = SimRank.attach

def untie_and_attach(self):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
    print("rank", os.getpid(), flush=True)
    attach(self)
    os.set_blocking(1, True)

SimRank.attach = untie_and_attach
import workers.ranks
serve = workers.ranks.serve_rank

def serve_and_stay(make, rank, link):
    serve(make, rank, link)
    signal.pause()  # rank 0 is gone, and this one is not

workers.ranks.serve_rank = serve_and_stay
configure_logging(form="console", level="info")
sys.exit(factory.run_engine_process(EngineSettings()))
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Crew]:
    with crew(tmp_path, "ab") as two:
        two.env["HOTSPARE_TENSOR_PARALLEL_SIZE"] = "2"
        for device in (0, 1):
            two.gms(device=device)
        yield two


def generations(pair: Crew) -> list[int]:
    found = []
    for device in (0, 1):
        path = pair.pod_dir / f"gms-cpu-{device}.sock"
        with GmsClient.connect(path, engine="t", instance="t", client="test", device=f"cpu:{device}") as client:
            found.append(next(pool.generation for pool in client.status().pools if pool.name == "kv"))
    return found


def test_nobody_is_elected_before_the_last_rank_is_gone(pair: Crew) -> None:
    a = pair.script("a", UNTIED, HOTSPARE_KEEPER="false")
    first = until_role(pair.admin["a"], "ACTIVE")
    pair.engine("b")
    pair.until_in_line("b")
    pages = generations(pair)
    rank = next(int(line.split()[1]) for line in a.output().splitlines() if line.startswith("rank "))
    try:
        a.signal(signal.SIGKILL)
        a.wait()
        assert not gone(rank, within=0.3)
        pair.until_in_line("b")
    finally:
        os.kill(rank, signal.SIGKILL)
    after = until_role(pair.admin["b"], "ACTIVE")
    assert after["epoch"] == first["epoch"] + 1
    assert generations(pair) == pages
    assert pair.complete()


def test_the_memory_services_wait_for_every_rank_even_if_the_lock_does_not(pair: Crew) -> None:
    """The lock file is replaced, so that the rank that lives holds a lock that elects nobody. Its pages, and those of
    rank 0, are not handed on without proof: the next engine gets new ones."""
    a = pair.script("a", UNTIED, HOTSPARE_KEEPER="false")
    first = until_role(pair.admin["a"], "ACTIVE")
    pages = generations(pair)
    rank = next(int(line.split()[1]) for line in a.output().splitlines() if line.startswith("rank "))
    try:
        a.signal(signal.SIGKILL)
        a.wait()
        (pair.pod_dir / "active.lock").unlink()
        b = pair.engine("b")
        after = until_role(pair.admin["b"], "ACTIVE")
        assert not gone(rank, within=0.0)
        assert after["epoch"] > first["epoch"]
        assert all(new != old for new, old in zip(generations(pair), pages, strict=True))
        assert "kv: new pages for epoch" in b.output()
        assert pair.complete()
    finally:
        os.kill(rank, signal.SIGKILL)
    until(lambda: gone(rank), saying="the rank is gone")


def rank_of(engine_pid: int) -> int:
    """The further rank of an engine's process."""
    (pid,) = Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split()
    return int(pid)


def test_a_spare_whose_rank_is_stopped_is_replaced_at_once_when_it_is_needed(pair: Crew) -> None:
    """Such a rank answers nothing, and is not waited for as long as a memory service may be."""
    a = pair.engine("a")
    first = until_role(pair.admin["a"], "ACTIVE")
    b = pair.engine("b")
    spare = pair.until_in_line("b")["pid"]
    os.kill(rank_of(spare), signal.SIGSTOP)
    a.signal(signal.SIGKILL)
    after = until_role(pair.admin["b"], "ACTIVE", seconds=20)
    assert after["pid"] != spare
    assert after["epoch"] > first["epoch"]
    assert "does not answer" in b.output()
    assert pair.complete()
