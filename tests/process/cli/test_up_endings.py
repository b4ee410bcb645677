"""Ends of ``up`` that are nobody's signal: what it says, and that it stops the rest first."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from app.cli.children import Child
from app.cli.errors import CliError
from app.cli.plan import Limits, PodPlan, UpOptions
from app.cli.screen import PlainScreen
from app.cli.starter import StartedPod
from app.cli.up import Up
from tests.support.machine import ROOT, UP, Machine, StartUp
from tests.support.pipes import full_pipe
from tests.support.processes import MS, until
from workers.pod_files import EngineRecord, PodRecord

pytestmark = pytest.mark.process

WAITS = [sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()"]
PLAN = PodPlan(name="pod-0", serving=1, admin=(2, 3), gms_metrics=4)
"""Ports at which nobody listens."""


class StubStarter:
    """A gateway and a pod that do nothing, and a model conversion that is over at once."""

    def __init__(self, folder: Path, *, pods_start: bool) -> None:
        self.port = 1
        self.gateway = Child("gateway", WAITS, environment=os.environ, log=folder / "gateway.log")
        self.model = Child("model", ["true"], environment=os.environ, log=folder / "model.log")
        self.pods: list[StartedPod] = []
        self._folder = folder
        self._pods_start = pods_start

    @property
    def children(self) -> list[Child]:
        return [self.gateway, self.model, *(pod.child for pod in self.pods)]

    def start_pods(self) -> None:
        if not self._pods_start:
            raise CliError("pod-0 cannot be started: no room", code=1)
        child = Child("pod-0", WAITS, environment=os.environ, log=self._folder / "pod-0.log")
        self.pods.append(StartedPod(PLAN, child))

    def kill_all(self) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill_all()
        for child in self.children:
            child.reap()
            child.close()


async def ended(folder: Path, *, pods_start: bool, start: float) -> tuple[str, StubStarter]:
    """The sentence with which it ends; every child has ended by then."""
    starter = StubStarter(folder, pods_start=pods_start)
    try:
        up = Up(
            UpOptions(run_dir=folder, engine="sim"),
            starter,  # type: ignore[arg-type]
            screen=PlainScreen(io.StringIO()),
            limits=Limits(gateway=5, pod=5, start=start),
            began=0.0,
            environment={},
        )
        with pytest.raises(CliError) as caught:
            await up.run([])
        assert not any(child.running for child in starter.children)
        return str(caught.value), starter
    finally:
        starter.close()


async def test_a_pod_that_cannot_be_started_is_one_sentence(tmp_path: Path) -> None:
    sentence, _ = await ended(tmp_path, pods_start=False, start=60)
    assert sentence == "pod-0 cannot be started: no room"


async def test_a_pod_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pod-0").mkdir()
    (tmp_path / "pod-0" / "pod.json").write_text("{")
    sentence, _ = await ended(tmp_path, pods_start=True, start=60)
    assert sentence.startswith(f"{tmp_path / 'pod-0' / 'pod.json'} is not a file of this version of hotspare: ")


async def test_a_start_that_does_not_go_on_is_given_up(tmp_path: Path) -> None:
    sentence, _ = await ended(tmp_path, pods_start=True, start=300 * MS)
    assert sentence.startswith("nothing has happened for ")
    assert "and this is not done: gateway, pod-0: memory service; the logs in " in sentence


def test_an_engine_that_never_gets_ready_is_given_up(start_up: StartUp) -> None:
    machine = start_up(HOTSPARE_SIM_STARTUP_SECONDS="600", HOTSPARE_STARTUP_TIMEOUT_SECONDS="2")
    assert machine.up.wait() == 1
    assert re.search(r"hotspare up: nothing has happened for \d+ s, and this is not done: ", machine.up.output())
    assert "Traceback" not in machine.up.output()
    assert machine.left() == []


@pytest.mark.parametrize("reader", ["asleep", "gone"])
def test_output_that_nobody_takes_does_not_keep_it_from_draining(tmp_path: Path, reader: str) -> None:
    reading_end, writing_end = full_pipe()
    if reader == "gone":
        os.close(reading_end)
    run_dir = tmp_path / "run"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    with subprocess.Popen(
        [sys.executable, "-m", "app.cli.main", *UP, "--run-dir", str(run_dir)],
        env={**clean, "PYTHONPATH": str(ROOT), "HOTSPARE_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=writing_end,
        stderr=subprocess.PIPE,
    ) as up:
        try:
            machine = Machine.__new__(Machine)
            machine.run_dir = run_dir

            def routed() -> bool:
                if not list(run_dir.glob("*/pod.json")):
                    return False
                (pod,) = machine.status()["pods"]
                return bool(pod["routed"] and pod["routed"]["routable"])

            until(routed, saying="the gateway routes to the pod")
            up.send_signal(signal.SIGTERM)
            _, complaints = up.communicate(timeout=10)
            assert (up.returncode, complaints) == (0, b"")
        finally:
            up.kill()
            os.close(writing_end)
            if reader == "asleep":
                os.close(reading_end)


async def test_a_stop_that_takes_a_while_names_what_is_left_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.up.NAMING_SECONDS", 100 * MS)
    stays = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    log = tmp_path / "pod-0.log"
    starter = StubStarter(tmp_path, pods_start=False)
    pod = Child("pod-0", [sys.executable, "-c", stays], environment=os.environ, log=log)
    starter.pods = [StartedPod(PLAN, pod)]
    until(lambda: "up" in log.read_text(), saying="it ignores SIGTERM")
    folder = tmp_path / "pod-0"
    folder.mkdir()
    engines = {
        "a": EngineRecord(pid=11, admin_port=2, restarts=0),
        "b": EngineRecord(pid=None, admin_port=3, restarts=0),
    }
    record = PodRecord(
        pod="pod-0", instance="i", pid=starter.pods[0].child.pid, host="h", serving_port=1, gms=None, engines=engines
    )
    (folder / "pod.json").write_bytes(msgspec.json.encode(record))
    screen = io.StringIO()
    try:
        up = Up(
            UpOptions(run_dir=tmp_path, engine="sim"),
            starter,  # type: ignore[arg-type]
            screen=PlainScreen(screen),
            limits=Limits(gateway=5, pod=2, start=60),
            began=0.0,
            environment={},
        )
        assert await up.run([signal.SIGINT]) == 70
    finally:
        starter.close()
    assert "waiting for pod-0's engine a (process 11) for " in screen.getvalue()
    assert "pod-0 did not end within 2 s and is killed" in screen.getvalue()


@pytest.mark.parametrize("victims", [("keeper",), ("keeper", "spare"), ("gms",), ("pod-0",), ("gateway",)])
def test_what_was_stopped_holds_nobody_up(start_up: StartUp, victims: tuple[str, ...]) -> None:
    machine = start_up()
    machine.until_complete()
    machine.descendants()
    for victim in victims:
        os.kill(_pid_of(machine, victim), signal.SIGSTOP)
    machine.up.signal(signal.SIGINT)
    assert machine.up.wait(seconds=20_000 * MS) == 0
    machine.assert_all_gone()
    assert machine.left() == []


def _pid_of(machine: Machine, name: str) -> int:
    (pod,) = machine.settled()["pods"]
    spare = next(engine for engine in pod["engines"].values() if engine["role"] == "STANDBY")
    match name:
        case "keeper":
            return int(spare["keeper_pid"])
        case "spare":
            return int(spare["pid"])
        case "gms":
            return int(json.loads((machine.run_dir / "pod-0" / "pod.json").read_text())["gms"]["pid"])
        case _:
            return machine.pid_of(name)


def test_a_run_folder_that_is_removed_is_whole_again(start_up: StartUp, tmp_path: Path) -> None:
    machine = start_up()
    machine.until_complete()
    gateway = machine.pid_of("gateway")
    shutil.rmtree(machine.run_dir.rename(tmp_path / "removed"))
    names = ("gateway.json", "up.lock", "logs/gateway.log", "logs/pod-0.log", "pod-0/pod.json")
    until(lambda: all((machine.run_dir / name).exists() for name in names), saying="all is there again")
    assert machine.pid_of("gateway") == gateway
    assert machine.settled()["gateway"]["inflight"] == 0
    kept = machine.run_dir / "logs" / "gateway.log"
    until(lambda: "listening on" in kept.read_text(), saying="what the gateway said at its start")
    machine.until_said("somebody removed .* while it is in use")
    second = start_up("--run-dir", str(machine.run_dir))
    assert second.up.wait() == 2
    machine.up.signal(signal.SIGINT)
    assert machine.up.wait() == 0
    assert "gateway exits" in (log := (machine.run_dir / "logs" / "gateway.log").read_text()) or "drained" in log
    assert machine.left() == []
