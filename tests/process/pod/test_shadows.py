"""Pods with two shadows and with none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.process.pod.sim_pods import COUNT, PROMPT, SimPod, supervised
from tests.support.processes import state_of, until
from workers.engines.sim.tokens import expected_text
from workers.ports import PortReservation

pytestmark = pytest.mark.process


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SimPod]:
    """A pod of three engines, not started."""
    with ExitStack() as stack:
        ports = [stack.enter_context(PortReservation()).port for _ in range(4)]
        yield SimPod(tmp_path / "run", ports)


def roles(pod: SimPod) -> dict[str, dict[str, Any]] | None:
    """Engine → state, once one serves and all others are parked."""
    states = [state_of(port) for port in pod.admin]
    seen = sorted(str(state["role"]) for state in states if state)
    if seen != ["ACTIVE", *["STANDBY"] * (len(pod.admin) - 1)]:
        return None
    return {state["engine"]: state for state in states if state}


def test_two_shadows_survive_two_deaths_at_once_over_one_copy_of_everything(three: SimPod, tmp_path: Path) -> None:
    """The memory service has room for weights and KV pages once, and not for either of them twice."""
    limit = str((8 << 20) + (16 << 20) + (1 << 20))
    with supervised(three, tmp_path, HOTSPARE_SHADOWS="2", HOTSPARE_GMS_MEMORY_LIMIT_BYTES=limit) as process:
        before = until(lambda: roles(three), saying="one serves, two are parked")
        assert sorted(state["memory"]["weights_role"] for state in before.values()) == ["reader", "reader", "writer"]
        held = three.memory().total_bytes
        active = next(state for state in before.values() if state["role"] == "ACTIVE")
        spare = next(state for state in before.values() if state["role"] == "STANDBY")
        until(lambda: (three.active() or {}).get("standby") == "STANDBY", saying="it knows of a spare")
        for dead in (spare, active):
            os.kill(dead["pid"], signal.SIGKILL)
        left = next(name for name in before if name not in (active["engine"], spare["engine"]))
        after = until(three.active, saying="an engine serves")
        assert after["engine"] == left
        assert three.complete() == expected_text(PROMPT, COUNT)
        again = until(lambda: roles(three), saying="one serves, two are parked again")
        assert [again[name]["restarts"] for name in sorted(again) if name != left] == [1, 1]
        assert three.memory().total_bytes == held
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not three.folder.exists()


def test_without_a_shadow_the_engine_that_died_is_forked_anew_and_its_pages_are_still_there(
    pod: SimPod, tmp_path: Path
) -> None:
    with supervised(pod, tmp_path, HOTSPARE_SHADOWS="0"):
        first = until(pod.active, saying="the engine serves")
        assert set(pod.record()["engines"]) == {"a"}
        assert (first["standby"], first["memory"]["weights_role"]) == (None, "writer")
        pages = pod.pool("kv").generation
        os.kill(first["pid"], signal.SIGKILL)
        second = until(
            lambda: state if (state := pod.active()) and state["pid"] != first["pid"] else None,
            saying="its keeper forked another one",
        )
        assert (second["engine"], second["epoch"]) == ("a", first["epoch"] + 1)
        assert second["keeper_pid"] == first["keeper_pid"]
        assert second["memory"]["weights_role"] == "reader"
        assert pod.pool("kv").generation == pages
        assert pod.complete() == expected_text(PROMPT, COUNT)
