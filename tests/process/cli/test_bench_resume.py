"""``hotspare bench resume``, short: a stream of the sim engine is killed in the middle, and measured."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.machine import hotspare
from tests.support.processes import MS

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def test_what_a_run_reports() -> None:
    with tempfile.TemporaryDirectory(prefix="hs-") as folder:
        done = hotspare(
            *("bench", "resume", "--engine", "sim", "--kills", "2", "--json", "--settle-seconds", "0.3"),
            *("--peers", "nginx,vllm-router", "--peers-dir", f"{folder}-without"),
            env={"TMPDIR": folder},
            deadline_seconds=150_000 * MS,
        )
        assert done.returncode == 0, done.stderr
        assert list(Path(folder).iterdir()) == []
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["engine"], report["kills"], report["delivered"]) == ("sim", 2, [16, 32])
    assert (report["lost"], report["wrong"], report["problems"]) == (0, 0, [])
    parts = [report[f"{name}_seconds"]["median"] for name in ("teardown", "prefill", "pause")]
    assert all(part > 0 for part in parts)
    assert report["pause_seconds"]["median"] > report["teardown_seconds"]["median"]
    there = sorted(report["peers"])
    assert sorted([*report["skipped"], *there]) == ["nginx", "vllm-router"]
    assert "make bench-peers" in report["skipped"]["vllm-router"]
    assert there == (["nginx"] if NGINX else []), report["skipped"]
    for peer in report["peers"].values():
        # On a busy machine all of an answer may have come before its engine's end.
        assert (peer["cut"] + peer["whole"], peer["wrong"], peer["error"]) == (2, 0, 0)
        assert peer["cut"] > 0
        assert peer["delivered"][0] >= 16
