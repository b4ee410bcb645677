"""`make gpu` on the fake driver, without a GPU, and out of time: what a machine with a GPU gets is known to work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import until

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


def run(*arguments: str, out: Path, seconds: float = 140, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "OUT": str(out), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def started_by(out: Path) -> list[str]:
    """Processes that have the run's environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"OUT={out}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_all_of_it_on_the_fake_driver(tmp_path: Path) -> None:
    """Of the process tests that it takes over, which run on the fake driver anyway, one of a kind."""
    some = "not (test_kv or test_weights or test_vllm) or after_a_kill_the_next or writes_and_the_next_reads"
    done = run("--fake-driver", "-k", some, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "gpu-report.md").read_text()
    assert report in done.stdout
    assert "This was the FAKE driver" in report
    for line in (
        "| a descriptor alone keeps the memory | True | True |",
        "| what a kept descriptor gives | intact | intact |",
        "| the pages that readers tried to write | intact | intact |",
        "| what that graph wrote is in the service's pages (cpu:0) | as expected | as expected |",
        "| chunk | chunks | together | create | export | import | map | set access | release | unmap |",
        "| 2 MiB | 24 | 48 MiB |",
    ):
        assert line in report, report
    until(lambda: not started_by(tmp_path), saying="nothing of it is left")  # what is killed goes a little later


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_drill_of_the_engines_with_a_cpu_for_a_gpu(tmp_path: Path) -> None:
    done = run("--fake-driver", "-k", "test_vllm", out=tmp_path, seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "gpu-report.md").read_text()
    assert "Tests: 1 passed." in report
    for fact in (
        "| vLLM: tokens of both engines | same | same |",
        "| vLLM: its prefix cache | carried over | carried over |",
    ):
        assert fact in report, report


def test_without_a_gpu_all_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run(out=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU here: " in done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]


def test_in_the_suite_of_all_tests_it_is_skipped(tmp_path: Path) -> None:
    """Whatever else is there: it needs the GPU for itself."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "tests/unit/layers", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs a GPU for itself: make gpu" in done.stdout
    assert "tests/gpu/test_facts.py ss" in done.stdout


def test_no_case_starts_when_little_time_is_left(tmp_path: Path) -> None:
    done = run("--fake-driver", "--seconds", "0", "-k", "[fresh] or [contexts]", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Skipped, 2: the time of this run is over" in done.stdout


def test_when_its_time_is_over_it_ends_what_runs_and_still_reports(tmp_path: Path) -> None:
    """Here a service that hangs in the driver. A busy machine may need longer to come to it."""
    hang = {"FAKE_CUDA_DELAY": "cuMemCreate=600000"}
    for seconds in (6, 30):
        started = time.monotonic()
        done = run(
            "--fake-driver", "--seconds", str(seconds), "-k", "identity or nothing_changes", out=tmp_path, **hang
        )
        took = time.monotonic() - started
        if re.search("test_nothing_changes_after_the_grant (?!SKIPPED)", done.stdout):
            break
    assert took < seconds + 60
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the time is over" in done.stdout
    assert "| granularity | 2097152 bytes | nothing |" in done.stdout
    until(lambda: not started_by(tmp_path), saying="nothing of it is left")
