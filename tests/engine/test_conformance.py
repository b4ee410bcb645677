"""``hotspare conformance --engine vllm``, over a memory service, with the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from app.cli.conformance.lives import LIVES
from app.cli.conformance.outcomes import Report

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "HOTSPARE_KV_CACHE_BYTES": str(64 << 20),
    "HOTSPARE_MAX_MODEL_LEN": "1024",
    # What a busy machine adds is no fault of the engine's; test_pair.py looks at the pauses themselves.
    "HOTSPARE_BEAT_TIMEOUT_SECONDS": "15",
    "HOTSPARE_ENGINE_SHUTDOWN_SECONDS": "20",
}


def test_vllm_keeps_its_promises() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    command = [sys.executable, "-m", "app.cli.main", "conformance", "--engine", "vllm", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, **SETTINGS}, capture_output=True, text=True, timeout=280, check=False
    )
    report = msgspec.json.decode(done.stdout, type=Report)
    wrong = {result.check: result.reason for result in report.results if result.outcome == "fail"}
    assert not wrong, done.stderr
    assert [result.check for result in report.results] == [check.name for life in LIVES for check in life.checks]
    assert not [result.check for result in report.results if result.outcome == "skip"]
    assert done.returncode == 0
