"""``hotspare bench gateway``, small: every figure comes, and nothing is left, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from app.cli.bench.gateway.figures import RATIOS
from tests.support.machine import ROOT, hotspare
from tests.support.processes import MS, Process, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"),
]


def left_over(folder: Path) -> list[str]:
    """Processes that were started with this folder for temporary files, and what is in it."""
    found = [entry.name for entry in folder.iterdir()]
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and f"TMPDIR={folder}".encode() in (process / "environ").read_bytes().split(
                b"\0"
            ):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_every_figure_comes_and_nothing_is_left(tmp_path: Path) -> None:
    done = hotspare(
        *("bench", "gateway", "--rounds", "1", "--seconds", "0.5", "--streams", "40", "--json"),
        *("--peers", "vllm-router", "--peers-dir", str(tmp_path / "none")),
        env={"TMPDIR": str(tmp_path)},
        deadline_seconds=100_000 * MS,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["problems"] == []
    assert set(report["gateways"]) == {"direct", "hotspare"}
    ours = report["gateways"]["hotspare"]
    assert {ratio.figure for ratio in RATIOS} <= set(ours)
    assert ours["failed"] == 0
    assert 0 < ours["kib_per_stream_40"] < 5000
    assert report["gateways"]["direct"]["rps_c32"] > ours["rps_c32"] > 0
    assert report["vs"] == {}
    assert "make bench-peers" in report["skipped"]["vllm-router"]
    until(lambda: not left_over(tmp_path), saying="nothing is left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number: int, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "app.cli.main", "bench", "gateway", "--only", "paced", "--seconds", "50"]
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    bench = Process("bench", command, env=env, log=tmp_path / "bench.log")
    try:
        until(lambda: "round 1" in bench.output(), saying="the first round began")
        assert len(left_over(temporary)) > 3
        os.kill(bench.pid, number)
        assert bench.wait() == 128 + number
        until(lambda: not left_over(temporary), saying="nothing is left")
    finally:
        bench.end()


def test_a_missing_compiler_is_a_sentence(tmp_path: Path) -> None:
    done = hotspare("bench", "gateway", env={"TMPDIR": str(tmp_path), "CC": "/nowhere/cc"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "hotspare bench: bench gateway: the C compiler /nowhere/cc cannot be used"
    )
    assert list(tmp_path.iterdir()) == []
