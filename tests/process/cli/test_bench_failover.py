"""``hotspare bench failover``, all three arms, as small as it gets: what it measures, writes, and leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.machine import ROOT, hotspare
from tests.support.processes import MS, Process, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

# Forty times as fast: 8 requests a second with 400 tokens of prompt and 100 of answer, and 2 s for a restart.
SMALL = (
    *("bench", "failover", "--engine", "sim", "--speed", "40", "--group", "40", "--rate", "0.2"),
    *("--prompt", "16000", "--answer", "4000", "--settle", "40", "--observe", "120", "--restart", "80"),
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for the run, whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hs-") as name:
        yield Path(name)


def started_by(folder: Path) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"TMPDIR={folder}".encode() in variables:
                found.add(int(entry))
    return found


def test_what_a_run_reports(tmp_path: Path, folder: Path) -> None:
    html, words, picture = tmp_path / "report.html", tmp_path / "report.md", tmp_path / "report.svg"
    files = ("--report", str(html), "--markdown", str(words), "--picture", str(picture))
    # However long a promotion takes here: it is the spare that is to go on, and 4 s for a restart are longer.
    env = {"TMPDIR": str(folder), "HOTSPARE_RESUME_HOME_SECONDS": "60"}
    done = hotspare(*SMALL, "--restart", "160", *files, "--json", env=env, deadline_seconds=150_000 * MS)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (done.stderr, report["broken"])

    cold, shadow, carry = (report["arms"][name] for name in ("cold", "shadow", "shadow_carry"))
    for arm in (cold, shadow, carry):
        assert (arm["lost"], arm["problems"]) == (0, [])
        assert arm["before"]["requests"] > 4
        assert arm["after"]["requests"] > 20
        assert arm["after"]["ttft_seconds"]["median"] > 0
        assert arm["after"]["tokens_per_second"]["median"] > 0
        assert arm["interrupted"] > 0
        assert arm["resumed"] > 0
        assert arm["step_ratio"] >= 1
        assert len(arm["each"]) == arm["requests"]
        for name in ("ttft", "tokens_per_second", "violations"):
            times = [at for at, _ in arm["series"][name]]
            assert min(times) < 0 < max(times), name
        assert set(arm["series"]["inflight"]) == set(arm["series"]["waiting"]) == {"pod-0", "pod-1"}
    assert cold["routable_seconds"] >= 160
    assert cold["spare_seconds"] is None
    for arm in (shadow, carry):
        assert arm["detected_seconds"] <= arm["routable_seconds"] < cold["routable_seconds"]
        assert arm["routable_seconds"] == pytest.approx(40 * arm["measured"]["routable_seconds"], abs=0.01)
        assert arm["spare_seconds"] >= 160
    assert report["ratio"] > 1
    assert carry["cached_tokens"] > 0 == shadow["cached_tokens"]
    assert carry["prefilled_again_tokens"] < shadow["prefilled_again_tokens"]

    page = ElementTree.fromstring(html.read_text().removeprefix("<!DOCTYPE html>\n"))
    assert len(list(page.iter("{http://www.w3.org/2000/svg}polyline"))) > 6
    assert re.search(r"\| requests lost \|\s*\|\s*\| 0 of \d+ \| 0 of \d+ \| 0 of \d+ \|", words.read_text())
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    until(lambda: not started_by(folder), saying="all processes of the run are gone")
    (tmp_path / "out").write_text(done.stdout)
    drawn = hotspare("bench", "failover", "--from", str(tmp_path / "out"), "--report", str(tmp_path / "again.html"))
    assert (drawn.returncode, drawn.stdout.rstrip()) == (0, words.read_text().rstrip())
    assert (tmp_path / "again.html").read_text() == html.read_text()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_everything_ends_with_it(tmp_path: Path, folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "app.cli.main", *SMALL, "--observe", "4000"]
    env = {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    run = Process("bench failover", command, env=env, log=tmp_path / "log")
    try:
        until(lambda: "cold: killed engine" in run.output(), saying="an engine was killed", seconds=45_000 * MS)
        assert len(started_by(folder)) > 4, run.output()
        run.signal(number)
        assert run.wait() != 0
        until(lambda: not started_by(folder), saying="all processes of the run are gone")
        assert number == signal.SIGKILL or list(folder.iterdir()) == []
        assert "Task exception was never retrieved" not in run.output()
    finally:
        run.end()


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "no JSON"])
def test_what_is_no_report_of_a_run_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "out").write_text(content)
    done = hotspare("bench", "failover", "--from", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "not the JSON of a run" in done.stderr


def test_what_only_the_sim_has_is_refused_for_others() -> None:
    done = hotspare("bench", "failover", "--engine", "vllm", "--speed", "2")
    assert done.returncode == 2
    assert "--engine sim" in done.stderr
