"""One ``hotspare up`` and what a test can see of it: its output, its run folder, and every process it led to."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.cli.status import look
from tests.support.processes import MS, RESTART_SECONDS, Process, gone, until

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 45_000 * MS
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HOTSPARE_SIM_RESTART_SECONDS": RESTART_SECONDS}
UP = ("up", "--engine", "sim", "--port", "0", "--base-port", "0")


def hotspare(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, deadline_seconds: float = DEADLINE_SECONDS
) -> subprocess.CompletedProcess[str]:
    """One short command, to its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *arguments],
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=deadline_seconds,
        check=False,
    )


class Machine:
    """``hotspare up`` in a process of its own."""

    def __init__(
        self,
        run_dir: Path,
        log_dir: Path,
        flags: Sequence[str],
        env: Mapping[str, str],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.run_dir = run_dir
        self._deadline = deadline_seconds
        command = [sys.executable, "-m", "app.cli.main", *UP, "--run-dir", str(run_dir), *flags]
        log = log_dir / f"up-{len(list(log_dir.glob('up-*.log')))}.log"
        self.up = Process("hotspare up", command, env={**ENVIRONMENT, **env}, log=log)
        # Each with when it began: numbers are used again.
        self._up = (self.up.pid, _began(self.up.pid))
        self._seen: set[tuple[int, int]] = set()

    # --- what it says

    def until_said(self, pattern: str) -> re.Match[str]:
        """Wait until its output holds ``pattern``."""

        def look() -> re.Match[str] | None:
            ended = self.up.popen.poll() is not None  # first: what it said before it ended is there then
            found = re.search(pattern, self.up.output(), re.MULTILINE)
            assert found or not ended, f"ended without saying {pattern!r}:\n{self.up.output()}"
            return found

        try:
            return until(look, saying=pattern, seconds=self._deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.up.output()}") from None

    def until_ready(self) -> str:
        """Wait until it says so; the API's base URL."""
        return self.until_said(r"^ready after [\d.]+ s: (https?://\S+)/v1$")[1]

    def until_complete(self) -> str:
        """Wait until every spare is parked, too; the API's base URL."""
        url = self.until_ready()
        for pod in self.status()["pods"]:
            self.until_said(rf"{pod['pod']}: [ab] is parked")
        return url

    # --- what is there

    def status(self) -> dict[str, Any]:
        """The status document, without the half second that the command's imports take."""
        return dict(msgspec.to_builtins(asyncio.run(look(self.run_dir))))

    def settled(self) -> dict[str, Any]:
        """The status once no gateway and no engine is silent: a look gives each a second, which is little on a busy
        machine."""
        return self.until_status(nobody_silent, saying="nobody is silent")

    def status_command(self, **env: str) -> dict[str, Any]:
        """``hotspare status --json``, once it says of nobody that it is silent."""

        def ask() -> dict[str, Any] | None:
            done = hotspare("status", "--json", "--run-dir", str(self.run_dir), env=env)
            assert done.stdout, done.stderr
            status = dict(json.loads(done.stdout))
            if not nobody_silent(status):
                return None
            assert done.returncode == 0, done.stderr
            return status

        return until(ask, saying="nobody is silent", seconds=self._deadline)

    def until_status(self, fits: Callable[[dict[str, Any]], bool], *, saying: str) -> dict[str, Any]:
        """Ask for the status until it fits."""

        def ask() -> dict[str, Any] | None:
            status = self.status()
            return status if fits(status) else None

        return until(ask, saying=saying, seconds=self._deadline)

    def fault(self, what: str, pod: str = "pod-0") -> str:
        done = hotspare("fault", what, pod, "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def descendants(self) -> set[int]:
        """Every process that ``up`` led to so far and that could be found; remembers those it has found before."""
        there = _processes()
        found = {pid for pid, began in {self._up, *self._seen} if pid in there and there[pid].began == began}
        while more := {pid for pid, process in there.items() if process.parent in found} - found:
            found |= more
        self._seen |= {(pid, there[pid].began) for pid in found} - {self._up}
        return {pid for pid, _ in self._seen}

    def pid_of(self, name: str) -> int:
        """A child of ``up`` by its log's name: gateway, pod-0, ..."""
        if name == "gateway":
            return int(json.loads((self.run_dir / "gateway.json").read_text())["pid"])
        return int(json.loads((self.run_dir / name / "pod.json").read_text())["pid"])

    def left(self) -> list[str]:
        """Files in the run folder, logs not counted."""
        names = (str(path.relative_to(self.run_dir)) for path in self.run_dir.rglob("*"))
        return sorted(name for name in names if name.partition("/")[0] != "logs")

    def assert_all_gone(self) -> None:
        """No process that was ever seen is left after 5 seconds."""
        left = {pid: _command(pid) for pid, began in self._seen if _began(pid) == began and not gone(pid)}
        assert not left, left

    def end(self) -> None:
        self.descendants()
        self.up.end()
        self.assert_all_gone()


StartUp = Callable[..., Machine]
"""``start_up("--pods", "2", HOTSPARE_X="...")``: flags of ``up``, and settings."""


def nobody_silent(status: dict[str, Any]) -> bool:
    """Whether gateway and engines answered, or are not there."""
    gateway = status["gateway"]
    engines = [engine["role"] for pod in status["pods"] for engine in pod["engines"].values()]
    return "silent" not in (gateway and gateway["lifecycle"], *engines)


class _Process(NamedTuple):
    parent: int
    began: int
    """In ticks since the machine's start."""


def _process(pid: int) -> _Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Process(parent=int(fields[1]), began=int(fields[19]))


def _processes() -> dict[int, _Process]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {pid: found for pid in pids if (found := _process(pid)) is not None}


def _began(pid: int) -> int:
    """-1 if there is no process of this number."""
    found = _process(pid)
    return -1 if found is None else found.began


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone by now"
