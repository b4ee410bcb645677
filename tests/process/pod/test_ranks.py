"""Engines of two ranks, each a process with a device and a memory service of its own: promoted and fenced as one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gms.client import GmsClient
from gms.protocol import PoolStatus
from tests.process.pod.sim_pods import COUNT, PROMPT, SimPod, supervised
from tests.support.processes import Process, gone, state_of, until
from workers.engines.sim.tokens import expected_text
from workers.ports import PortReservation

pytestmark = pytest.mark.process


@pytest.fixture
def two_ranks(pod: SimPod, tmp_path: Path) -> Iterator[tuple[SimPod, Process]]:
    with supervised(pod, tmp_path, HOTSPARE_TENSOR_PARALLEL_SIZE="2") as process:
        yield pod, process


def kv(pod: SimPod, device: int) -> PoolStatus:
    path = pod.folder / f"gms-cpu-{device}.sock"
    with GmsClient.connect(path, engine="test", instance="test", client="test", device=f"cpu:{device}") as client:
        return next(pool for pool in client.status().pools if pool.name == "kv")


def rank_of(state: dict[str, Any]) -> int:
    """The pid of an engine's rank 1: its only child."""
    (child,) = Path(f"/proc/{state['pid']}/task/{state['pid']}/children").read_text().split()
    return int(child)


def promoted(pod: SimPod, after: dict[str, Any]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        state = pod.active()
        return state if state and state["epoch"] > after["epoch"] else None

    return until(look, saying="another engine serves")


def holders(pod: SimPod) -> list[tuple[str, int | None, int]]:
    """Of both devices' KV pages: engine, pid, and epoch."""
    pools = [kv(pod, device) for device in (0, 1)]
    return [(pool.leases[0].engine, pool.leases[0].pid, pool.epoch) for pool in pools if pool.leases]


@pytest.mark.parametrize("killed", ["rank 0", "rank 1"])
def test_the_death_of_any_rank_promotes_the_other_pair_over_the_same_pages(
    two_ranks: tuple[SimPod, Process], killed: str
) -> None:
    pod, process = two_ranks
    active, parked = pod.until_pair()
    ranks, spares = (active["pid"], rank_of(active)), (parked["pid"], rank_of(parked))
    assert holders(pod) == [(active["engine"], pid, active["epoch"]) for pid in ranks]
    pages = [kv(pod, device).generation for device in (0, 1)]
    assert pod.complete() == expected_text(PROMPT, COUNT)
    os.kill(ranks[0 if killed == "rank 0" else 1], signal.SIGKILL)
    assert all(gone(pid) for pid in ranks)
    after = promoted(pod, active)
    assert (after["engine"], after["pid"]) == (parked["engine"], parked["pid"])
    assert holders(pod) == [(after["engine"], pid, after["epoch"]) for pid in spares]
    assert [kv(pod, device).generation for device in (0, 1)] == pages
    assert pod.complete() == expected_text(PROMPT, COUNT)
    again = pod.until_pair()[1]
    assert rank_of(again) not in (*ranks, *spares)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert all(gone(pid) for pid in (*spares, again["pid"]))
    assert not pod.folder.exists()


def test_a_rank_that_was_stopped_dies_with_rank_0_and_keeps_nobody_waiting(two_ranks: tuple[SimPod, Process]) -> None:
    pod, _ = two_ranks
    active, _ = pod.until_pair()
    rank = rank_of(active)
    pages = [kv(pod, device).generation for device in (0, 1)]
    os.kill(rank, signal.SIGSTOP)
    os.kill(active["pid"], signal.SIGKILL)
    promoted(pod, active)
    assert gone(rank)
    assert [kv(pod, device).generation for device in (0, 1)] == pages


def test_one_device_without_memory_keeps_all_ranks_from_waking(pod: SimPod, tmp_path: Path) -> None:
    """The second device's memory service is away: no rank maps anything, and the port stays closed."""
    with supervised(
        pod,
        tmp_path,
        HOTSPARE_TENSOR_PARALLEL_SIZE="2",
        HOTSPARE_MEMORY_CONNECT_SECONDS="0.3",
        HOTSPARE_HEARTBEAT_SECONDS="0.2",
    ):
        active, parked = pod.until_pair()
        service = pod.record()["more_gms"]["gms-1"]["pid"]
        os.kill(service, signal.SIGSTOP)
        os.kill(active["pid"], signal.SIGKILL)
        port = next(port for port in pod.admin if (s := state_of(port)) and s["pid"] == parked["pid"])
        until(lambda: "service: " in str((state_of(port) or {}).get("obstacle")), saying="it says what is in the way")
        state = state_of(port)
        assert state is not None
        assert state["role"] != "ACTIVE"
        with contextlib.suppress(ProcessLookupError):
            os.kill(service, signal.SIGCONT)
        promoted(pod, active)
        assert pod.complete() == expected_text(PROMPT, COUNT)
        assert len(holders(pod)) == 2


def test_each_memory_service_serves_metrics_of_its_own(pod: SimPod, tmp_path: Path) -> None:
    with PortReservation() as one, PortReservation() as other:
        ports = {"HOTSPARE_GMS_METRICS_PORT": str(one.port), "HOTSPARE_MORE_GMS_METRICS_PORTS": str(other.port)}
        with supervised(pod, tmp_path, HOTSPARE_TENSOR_PARALLEL_SIZE="2", **ports):
            pod.until_pair()
            assert pod.record()["more_gms"]["gms-1"]["metrics_port"] == other.port
            for port in (one.port, other.port):
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text
                assert 'hotspare_gms_pool_bytes{pool="weights/' in text
