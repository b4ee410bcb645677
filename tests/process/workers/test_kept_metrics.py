"""Counters of an engine go on where the engine before was killed, whoever started the next one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Process, gone, running, until, until_role
from workers.contract import Role
from workers.ports import PortReservation

pytestmark = pytest.mark.process

Series = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(2)]


def engine(
    folder: Path, ports: list[int], *flags: str, instance: str = "one"
) -> contextlib.AbstractContextManager[Process]:
    env = {
        "HOTSPARE_RUN_DIR": str(folder),
        "HOTSPARE_ENGINE": "sim",
        "HOTSPARE_INSTANCE": instance,
        "HOTSPARE_SERVING_PORT": str(ports[0]),
        "HOTSPARE_BEAT_TIMEOUT_SECONDS": "2.5",
    }
    arguments = ("engine", "--admin-port", str(ports[1]), "--no-gms", *flags)
    return running("engine", "workers", *arguments, log_dir=folder, env=env)


def counted(port: int) -> dict[Series, float]:
    """All that must not go down: counters and histograms of ours."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("hotspare_engine_") and family.type in ("counter", "histogram")
        for sample in family.samples
    }


def value(found: dict[Series, float], name: str, **labels: str) -> float:
    return found.get((f"hotspare_engine_{name}", tuple(sorted(labels.items()))), 0.0)


def assert_nothing_went_down(before: dict[Series, float], after: dict[Series, float]) -> None:
    assert {series: (was, after.get(series)) for series, was in before.items() if after.get(series, -1.0) < was} == {}


def active(port: int, *, but: int = 0) -> int:
    """Pid of the active engine, once it is another one."""

    def another() -> int | None:
        pid = int(until_role(port, Role.ACTIVE)["pid"])
        return pid if pid != but else None

    return until(another, saying="another engine is active")


def test_over_the_deaths_of_engines_that_a_keeper_forks(tmp_path: Path, ports: list[int]) -> None:
    with engine(tmp_path, ports):
        pid, before = 0, {}
        for life in range(1, 4):
            pid = active(ports[1], but=pid)
            found = counted(ports[1])
            assert_nothing_went_down(before, found)
            assert value(found, "promotions_total", outcome="promoted") == life
            assert value(found, "recovery_seconds_count", phase="map") == life
            assert value(found, "recovery_seconds_count", phase="bind") == life
            assert value(found, "transitions_total", before="PROMOTING", after="ACTIVE") == life
            assert value(found, "deaths_total", how="signal_9") == life - 1
            before = found
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
        pid = active(ports[1], but=pid)
        os.kill(pid, signal.SIGSTOP)
        assert gone(pid)
        active(ports[1], but=pid)
        found = counted(ports[1])
    assert_nothing_went_down(before, found)
    assert value(found, "deaths_total", how="no_beat") == 1
    assert value(found, "recovery_seconds_count", phase="teardown") == 1  # only of the one that the keeper killed
    assert value(found, "role_seconds_total", role="ACTIVE") > 2, "the stopped one was active until it was gone"


def test_over_a_new_process_of_the_engine_and_not_over_a_new_pod(tmp_path: Path, ports: list[int]) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = {}
        for life in (1, 2):
            with engine(tmp_path, ports, "--no-keeper", instance=number.name) as process:
                active(ports[1])
                found = counted(ports[1])
                assert_nothing_went_down(before, found)
                assert value(found, "promotions_total", outcome="promoted") == life
                before = found
                process.signal(number)
                process.wait()
