"""``hotspare bench load`` for seconds: every kind of request, pods that are rolled and lost, and what ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench.loadtest.arrivals import arrivals
from app.cli.bench.loadtest.files import read_scenario
from app.cli.bench.loadtest.scenario import KINDS
from tests.process.cli.runs import assert_nothing_is_left, started_by
from tests.support.machine import ROOT, StartUp, hotspare
from tests.support.processes import MS, Process, until
from workers.ports import PortReservation

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

LOCUST = (sys.executable, "-m", "locust", "--locustfile", str(ROOT / "loadtest" / "locustfile.py"), "--headless")


def write(path: Path, **keys: Any) -> Path:
    """A scenario, as JSON, which YAML can read."""
    usual = {"seed": 3, "prompt_words": 8, "answer_tokens": {"uniform": {"least": 2, "most": 20}}}
    path.write_text(json.dumps({**usual, **keys}))
    return path


def run(folder: Path, scenario: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and what was said beside it."""
    done = hotspare(
        *("bench", "load", str(scenario), "--json", *arguments),
        env={"TMPDIR": str(folder)},
        deadline_seconds=150_000 * MS,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert_nothing_is_left(folder)
    return done.returncode, report, done.stderr


def assert_all_well(code: int, report: dict[str, Any]) -> None:
    assert (report["lost"], report["wrong"], report["refused"]) == (0, 0, {}), report["problems"]
    assert (code, report["passed"]) == (0, True), (report["limits"], report["events"])
    assert report["good"] + report["left"] == report["requests"]
    assert (report["engine"], report["checked"]) == ("sim", "bytes")


def test_every_kind_of_request(tmp_path: Path, folder: Path) -> None:
    path = write(
        tmp_path / "all.yaml",
        phases=[{"seconds": 2, "rate": 10}, {"name": "more", "seconds": 2, "rate": 10, "to": 20}],
        mix=dict.fromkeys(KINDS, 1),
        answer_tokens={"uniform": {"least": 10, "most": 25}},
        cancels=0.3,
        slow_readers=0.1,
    )
    code, report, _ = run(folder, path)
    assert_all_well(code, report)
    planned = list(arrivals(read_scenario(str(path))))
    assert report["requests"] == len(planned)
    assert sum(report["kinds"][kind]["requests"] for kind in KINDS) == len(planned)
    assert [phase["requests"] for phase in report["phases"]] == [
        sum(arrival.phase == phase for arrival in planned) for phase in (0, 1)
    ]
    assert report["phases"][1]["name"] == "more"
    for kind, tally in report["kinds"].items():
        assert tally["requests"] > 0
        assert tally["tokens"] > 0
        assert (tally["ttft_seconds"]["count"] > 0) is KINDS[kind][1]
        assert (tally["itl_seconds"]["count"] > 0) is KINDS[kind][1]
    assert report["left"] > 0
    assert report["generator"]["late_seconds"]["count"] == len(planned)


def test_a_rollout_that_nobody_notices(tmp_path: Path, folder: Path) -> None:
    events = [
        {"at": 0.5, "do": "roll", "pod": 0},
        {"at": 1, "do": "restart-pod", "pod": 1},
        {"at": 6, "do": "handover", "pod": 1},
    ]
    path = write(
        tmp_path / "rollout.yaml",
        pods=2,
        phases=[{"seconds": 8, "rate": 8}],
        mix={"chat-stream": 3, "chat": 1, "realtime": 1},
        answer_tokens=50,
        events=events,
    )
    code, report, _ = run(folder, path)
    assert_all_well(code, report)
    assert [(event["do"], event["problem"]) for event in report["events"]] == [(event["do"], "") for event in events]


def test_a_node_that_is_lost_and_comes_back(tmp_path: Path, folder: Path) -> None:
    events = [{"at": 1, "do": "lose-pod", "pod": 1}, {"at": 2.5, "do": "start-pod", "pod": 1}]
    path = write(
        tmp_path / "node-loss.yaml",
        pods=2,
        phases=[{"seconds": 1, "rate": 8}, {"seconds": 4, "rate": 8}],
        mix={"chat-stream": 3, "completions": 1, "realtime": 1},
        answer_tokens=50,
        limits={"refused": 0},
        events=events,
    )
    code, report, _ = run(folder, path)
    assert_all_well(code, report)
    lost, back = report["events"]
    assert re.fullmatch(r"pod-1 is lost: SIGKILL to all of its \d+ processes", lost["told"]), lost
    assert back["told"].startswith("pod-1 is there again after "), back


def test_against_a_server_that_runs(tmp_path: Path, folder: Path, start_up: StartUp) -> None:
    """A limit that is broken; answers that nobody knows; and Locust by itself, as a master and two workers."""
    url = start_up().until_complete()
    path = write(
        tmp_path / "it.yaml",
        phases=[{"seconds": 1.5, "rate": 20}],
        mix={"chat-stream": 1, "completions": 1},
        limits={"ttft_p99_seconds": 0.0001},
    )
    planned = len(list(arrivals(read_scenario(str(path)))))
    code, report, said = run(folder, path, "--host", url, "--engine", "sim")
    assert (code, report["passed"], report["lost"], report["wrong"]) == (1, False, 0, 0), report
    assert "failed: the limit ttft_p99_seconds is 0.0001, and was broken: 0." in said
    assert (report["requests"], report["host"], report["checked"]) == (planned, url, "bytes")
    code, report, _ = run(folder, write(path, phases=[{"seconds": 1, "rate": 5}], mix={"chat": 1}), "--host", url)
    assert (code, report["checked"], report["good"]) == (0, "form", report["requests"])

    path = write(path, phases=[{"seconds": 1.5, "rate": 20}], mix={"chat-stream": 1, "completions": 1})
    options = ("--host", url, "--scenario", str(path), "--only-summary")
    with PortReservation() as reserved:
        assert shown_by_a_master_and_two(folder, tmp_path, reserved.port, *options) == planned


def shown_by_a_master_and_two(folder: Path, cwd: Path, number: int, *arguments: str) -> int:
    """As :func:`shown_by_locust`, of a master that listens on this port, and two workers."""
    port = str(number)
    worker = [*LOCUST, "--worker", "--master-port", port]
    env = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    workers = [Process(f"worker {one}", worker, env=env, log=cwd / f"worker-{one}.log") for one in (0, 1)]
    try:
        master = ("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2")
        shown = shown_by_locust(folder, cwd, *arguments, *master)
        assert [one.wait() for one in workers] == [0, 0]
        return shown
    finally:
        for one in workers:
            one.end()


def shown_by_locust(folder: Path, cwd: Path, *arguments: str) -> int:
    """How many requests Locust has counted, all of them without a failure."""
    done = subprocess.run(
        [*LOCUST, *arguments],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60_000 * MS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    for row in ("TTFT +chat-stream", "ITL +chat-stream", "tok/s +chat-stream", "late +generator"):
        assert re.search(rf"^{row} +[1-9]\d* +0\(", said, re.MULTILINE), said
    found = re.search(r"^ +Aggregated +(\d+) +0\(0\.00%\)", said, re.MULTILINE)
    assert found, said
    return int(found[1])


def refused(*arguments: str) -> str:
    done = hotspare("bench", "load", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    phases = [{"seconds": 1, "rate": 1}]
    path = write(tmp_path / "it.yaml", phases=phases, mix={"chat": 1}, prompt_word=3)
    assert refused(str(path)) == (
        f"hotspare bench: bench load: {path}: the key 'prompt_word' is unknown; did you mean prompt_words?\n"
    )
    write(path, phases=phases, mix={"chat": 1}, events=[{"at": 0, "do": "kill-active"}])
    assert "only to a fleet that this command started itself" in refused(str(path), "--host", "http://127.0.0.1:1")


def test_a_server_that_is_not_there(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "it.yaml", phases=[{"seconds": 1, "rate": 1}], mix={"chat": 1})
    with PortReservation() as nobody:
        url = f"http://127.0.0.1:{nobody.port}"
        done = hotspare("bench", "load", str(path), "--host", url, env={"TMPDIR": str(folder)})
    assert done.returncode == 2
    assert f"nobody answers at {url}" in done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_everything_ends_with_it(tmp_path: Path, folder: Path, number: signal.Signals) -> None:
    path = write(
        tmp_path / "it.yaml",
        pods=2,
        phases=[{"seconds": 120, "rate": 10}],
        mix={"chat-stream": 1},
        events=[{"at": 0.1, "do": "restart-pod", "pod": 1}],
    )
    command = [sys.executable, "-m", "app.cli.main", "bench", "load", str(path)]
    env = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    load = Process("bench load", command, env=env, log=tmp_path / "log")
    try:
        until(lambda: "pod-1 is there again" in load.output(), saying="a pod was restarted", seconds=60_000 * MS)
        assert len(started_by(folder)) > 9, load.output()
        load.signal(number)
        assert load.wait(seconds=60_000 * MS) != 0
        until(lambda: not started_by(folder), saying="all processes of the run are gone")
        assert number == signal.SIGKILL or list(folder.iterdir()) == []
    finally:
        load.end()
