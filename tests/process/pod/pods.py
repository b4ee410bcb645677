"""A supervisor over stand-ins for its processes, and what a test can see of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import MS, Process, until

HERE = Path(__file__).parent
STANDIN = HERE / "standin.py"
SUPERVISE = HERE / "supervise.py"
ROOT = HERE.parents[2]
NAMES = ("gms", "engine-a", "engine-b")


class Pod:
    """A supervisor over stand-ins, in a process of its own."""

    def __init__(self, run_dir: Path, log_dir: Path, standins: dict[str, list[str]], env: dict[str, str]) -> None:
        self.folder = run_dir / "pod-0"
        commands = {name: [sys.executable, str(STANDIN), *standins.get(name, [])] for name in NAMES}
        settings = {
            "PYTHONPATH": str(ROOT),
            "HOTSPARE_RUN_DIR": str(run_dir),
            "HOTSPARE_DRAIN_TIMEOUT_SECONDS": "0",
            "HOTSPARE_ENGINE_SHUTDOWN_SECONDS": str(100 * MS),
            "HOTSPARE_LIVENESS_PERIOD_SECONDS": str(20 * MS),
            "HOTSPARE_LIVENESS_FAILURES": "3",
        }
        log = log_dir / f"pod-{len(list(log_dir.glob('pod-*')))}.log"
        script = [sys.executable, str(SUPERVISE), json.dumps(commands)]
        self.process = Process("supervisor", script, env={**settings, **env}, log=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "pod.json").read_bytes()))

    def said(self, pattern: str) -> list[re.Match[str]]:
        """Where ``pattern`` is in the output so far."""
        return list(re.finditer(pattern, self.process.output(), re.MULTILINE))

    def until_said(self, pattern: str, *, times: int = 1) -> re.Match[str]:
        """Wait until the output holds ``pattern`` this often; the latest."""

        def look() -> re.Match[str] | None:
            ended = self.process.popen.poll() is not None  # first: what it said before it ended is there then
            found = self.said(pattern)
            assert found or not ended, self.process.output()
            return found[times - 1] if len(found) >= times else None

        try:
            return until(look, saying=pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.process.output()}") from None

    def until_up(self, name: str, *, life: int = 1) -> int:
        """Wait for a process to say that it is ready in its n-th life; its pid."""
        return int(self.until_said(rf"^pod-0/{name} up (\d+)$", times=life)[1])

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


StartPod = Callable[..., Pod]
"""``start_pod(gms=[...], a=[...], b=[...], HOTSPARE_X="...")``: flags of standin.py, and settings."""
