"""``hotspare bench chaos``, short: it tells what it saw, and whatever ends it, nothing of it is left."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from app.cli.bench.chaos.plan import kills
from tests.process.cli.runs import assert_nothing_is_left, started_by
from tests.support.machine import ROOT, hotspare
from tests.support.processes import MS, Process, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

SMALL = ("bench", "chaos", "--engine", "sim", "--streams", "8", "--kill-every", "1", "--seed", "11", "--json")


def test_what_a_run_reports(folder: Path) -> None:
    """As long, and with as many clients, as two cores bear that other tests keep busy, too."""
    done = hotspare(
        *SMALL, *("--streams", "24", "--seconds", "16"), env={"TMPDIR": str(folder)}, deadline_seconds=150_000 * MS
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["seed"], report["engine"], report["streams"]) == (11, "sim", 24)
    assert (report["lost"], report["wrong"]) == (0, 0), report["problems"]
    assert done.returncode == 0
    assert report["good"] > 50
    counted = report["good"] + report["left"] + report["lost"] + sum(report["refused"].values())
    assert report["requests"] == counted == sum(report["by_manner"].values())
    planned = Counter(kill.fault.value for kill in kills(seed=11, seconds=16, every=1, pods=2))
    done_kills = Counter(report["kills"])
    assert done_kills.pop("all") + report["kills_skipped"] == planned.total() == 15
    assert done_kills <= planned
    assert done_kills["kill-active"] > 0  # those that nobody could be found for within half a second are skipped
    assert_nothing_is_left(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_everything_ends_with_it(tmp_path: Path, folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "app.cli.main", *SMALL, "--seconds", "60"]
    env = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    run = Process("bench chaos", command, env=env, log=tmp_path / "log")
    try:
        until(lambda: "sent SIG" in run.output(), saying="something was killed", seconds=45_000 * MS)
        assert len(started_by(folder)) > 8, run.output()
        run.signal(number)
        assert run.wait() != 0
        until(lambda: not started_by(folder), saying="all processes of the run are gone")
        assert number == signal.SIGKILL or list(folder.iterdir()) == []
    finally:
        run.end()
