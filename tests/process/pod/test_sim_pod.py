"""A whole pod: the supervisor over the real memory service and two sim engines."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.process.pod.sim_pods import COUNT, PROMPT, SimPod, supervised
from tests.support.processes import MS, gone, running, state_of, until, until_role
from workers.engines.sim.tokens import expected_text

pytestmark = pytest.mark.process


def test_from_start_to_stop(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path) as process:
        active, parked = pod.until_pair()
        assert pod.complete() == expected_text(PROMPT, COUNT)
        record = pod.record()
        assert {active["keeper_pid"], parked["keeper_pid"]} == {engine["pid"] for engine in record["engines"].values()}
        assert active["instance"] == parked["instance"] == record["instance"]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert all(gone(pid) for pid in (active["pid"], parked["pid"], record["gms"]["pid"]))
        assert not pod.folder.exists()


def test_a_killed_engine_is_followed_by_the_other_with_the_same_text(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        active, parked = pod.until_pair()
        os.kill(active["pid"], signal.SIGKILL)
        port = next(port for port in pod.admin if (state := state_of(port)) and state["pid"] == parked["pid"])
        assert until_role(port, "ACTIVE")["epoch"] == active["epoch"] + 1
        assert pod.complete() == expected_text(PROMPT, COUNT)
        pod.until_pair()
        assert {engine["restarts"] for engine in pod.record()["engines"].values()} == {0}  # its keeper forked it


def test_a_killed_keeper_is_started_again_by_the_supervisor(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        active, _ = pod.until_pair()
        os.kill(active["keeper_pid"], signal.SIGKILL)
        assert gone(active["pid"])
        again, spare = pod.until_pair()
        assert again["epoch"] == active["epoch"] + 1
        assert spare["keeper_pid"] != active["keeper_pid"]
        assert sorted(engine["restarts"] for engine in pod.record()["engines"].values()) == [0, 1]
        assert pod.complete() == expected_text(PROMPT, COUNT)


def test_a_killed_memory_service_is_started_again_and_nobody_is_silenced(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path):
        pod.until_pair()
        first = pod.record()["gms"]["pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: pod.record()["gms"]["pid"] not in (None, first), saying="the memory service is started again")
        assert pod.complete() == expected_text(PROMPT, COUNT)


def test_a_hung_memory_service_is_replaced_and_a_shadow_can_be_promoted(pod: SimPod, tmp_path: Path) -> None:
    """Most likely before it has answered a probe at all: it is not given a model's time to start."""
    with supervised(pod, tmp_path) as process:
        active, _ = pod.until_pair()
        service = pod.record()["gms"]["pid"]
        os.kill(service, signal.SIGSTOP)
        os.kill(active["pid"], signal.SIGKILL)
        until(lambda: "gms is not alive" in process.output(), saying="the supervisor found it out")
        assert gone(service)
        promoted, _ = pod.until_pair()
        assert promoted["epoch"] > active["epoch"]
        assert pod.complete() == expected_text(PROMPT, COUNT)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_nothing_outlives_a_killed_supervisor(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path) as process:
        active, parked = pod.until_pair()
        pids = [active["pid"], active["keeper_pid"], parked["pid"], parked["keeper_pid"], pod.record()["gms"]["pid"]]
        os.kill(process.pid, signal.SIGKILL)
        assert all(gone(pid, within=5000 * MS) for pid in pids)


def test_a_pod_whose_ports_another_pod_has_ends(pod: SimPod, tmp_path: Path) -> None:
    """Engines answer at its admin ports, and none of them is its own."""
    with supervised(pod, tmp_path):
        pod.until_pair()
        others = {**pod.settings, "HOTSPARE_RUN_DIR": str(tmp_path / "another")}
        others["HOTSPARE_LIVENESS_PERIOD_SECONDS"] = "0.02"
        with running("another", "workers", "pod", log_dir=tmp_path, env=others) as another:
            assert another.wait() == 2
        assert "the admin port cannot be opened" in another.output()
        assert pod.complete()


def test_settings_that_no_engine_can_start_with_end_the_pod(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_SIM_KV_BYTES="65536", HOTSPARE_CAPACITY="4096") as process:
        assert process.wait() == 2
        (said,) = re.findall("the pod cannot start with this configuration; engine-[ab] says: (.*)", process.output())
        assert "sim.kv_bytes (65536) is too small for a capacity of 4096 requests" in said
        assert "Traceback" not in process.output()
