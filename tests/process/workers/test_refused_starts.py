"""What no process of a pod can work with is one sentence and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import ROOT

pytestmark = pytest.mark.process

COMMANDS = [["workers", "pod"], ["workers", "engine"], ["gms"]]


def refused(tmp_path: Path, command: list[str], *, ulimit: str = "true", **env: str | bytes) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    done = subprocess.run(
        ["/bin/sh", "-c", f'{ulimit}; exec "$@"', "sh", sys.executable, "-m", *command],
        env={**clean, "HOTSPARE_ENGINE": "sim", "HOTSPARE_RUN_DIR": str(tmp_path / "run"), **env},
        cwd=ROOT,
        capture_output=True,
        timeout=40,
        check=False,
    )
    said = done.stderr.decode() + done.stdout.decode()
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert "internal error" not in said
    assert said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_files(tmp_path: Path, command: list[str]) -> None:
    assert "may open 20 files at a time and needs" in refused(tmp_path, command, ulimit="ulimit -n 20")


@pytest.mark.parametrize("command", [*COMMANDS, ["app", "--workers", "127.0.0.1:1"]])
def test_settings_that_are_no_text(tmp_path: Path, command: list[str]) -> None:
    said = refused(tmp_path, command, HOTSPARE_SERVED_MODEL_NAME=b"mod\xffel")
    assert "HOTSPARE_SERVED_MODEL_NAME: its bytes are no UTF-8" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_parent_that_cannot_be(tmp_path: Path, command: list[str]) -> None:
    assert "HOTSPARE_PARENT_PID" in refused(tmp_path, command, HOTSPARE_PARENT_PID="-1")
