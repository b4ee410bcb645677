"""``hotspare`` as process 1 of a PID namespace, as in a container: signals reach it early, and no zombie stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.machine import ROOT
from tests.support.processes import DEADLINE_SECONDS, get_json, until
from workers.ports import PortReservation

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
KINDS = ("gateway", "gateway of two", "engine", "engine without a keeper", "gms", "pod")


def refused() -> str:
    """Why this machine cannot; empty if it can."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return "there is no unshare command; install util-linux"
    return done.stderr.strip() if done.returncode else ""


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(reason := refused()), reason=f"PID namespaces cannot be made here: {reason}"),
]


class First:
    """One kind of process, alone in its namespace."""

    def __init__(self, kind: str, tmp_path: Path, ports: Sequence[int]) -> None:
        self.kind = kind
        engine = f"engine --no-gms --admin-port {ports[0]} --serving-port {ports[1]}"
        words = {
            "gateway": f"gateway --port {ports[0]}",
            "gateway of two": f"gateway --port {ports[0]} --processes 2",
            "engine": engine,
            "engine without a keeper": f"{engine} --no-keeper",
            "gms": "gms",
            "pod": f"pod --admin-ports {ports[0]},{ports[2]} --serving-port {ports[1]} --gms-metrics-port 0",
        }[kind].split()
        self._port = ports[0]
        self._socket = tmp_path / "run" / "pod-0" / "gms-cpu-0.sock"
        self._log = tmp_path / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
        env = {**clean, "PYTHONPATH": str(ROOT), "HOTSPARE_ENGINE": "sim", "HOTSPARE_RUN_DIR": str(tmp_path / "run")}
        with self._log.open("wb") as log:
            self.outer = subprocess.Popen(
                [*UNSHARE, sys.executable, "-m", "app.cli.main", *words], env=env, stdout=log, stderr=log, cwd=tmp_path
            )
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        self.pid = int(until(lambda: children.read_text().strip() or None, saying="it is started"))

    def until_held(self) -> None:
        """Until the kernel keeps signals for it: its own first deed (and, for a moment, unshare's before it)."""
        until(self._is_python, saying="it is the interpreter")
        until(lambda: self._has("SigBlk", signal.SIGTERM), saying="signals are held")

    def until_ready(self) -> None:
        if self.kind == "gms":
            until(self._socket.exists, saying="the socket is there")
            until(lambda: self._has("SigCgt", signal.SIGTERM), saying="signals are heard")
        elif self.kind.startswith("gateway"):
            until(lambda: get_json(f"http://127.0.0.1:{self._port}/live"), saying="it answers")
        else:
            until(
                lambda: (get_json(f"http://127.0.0.1:{self._port}/state") or {}).get("role") in ("ACTIVE", "STANDBY"),
                saying="the engine is up",
            )

    def zombies(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if is_zombie(pid)]

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.outer.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.kind} did not end:\n{self.output()}") from None

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait()

    def _is_python(self) -> bool:
        return Path(f"/proc/{self.pid}/comm").read_text().startswith("python")

    def _has(self, name: str, number: signal.Signals) -> bool:
        """Whether the signal is in that mask of its (proc(5), status)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        raise AssertionError(f"{name} is not listed")


def is_zombie(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # buried meanwhile
        return False


@contextmanager
def first(kind: str, tmp_path: Path) -> Iterator[First]:
    with ExitStack() as stack:
        process = First(kind, tmp_path, [stack.enter_context(PortReservation()).port for _ in range(3)])
        stack.callback(process.end)
        yield process


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_ended_at_the_terminal(kind: str, tmp_path: Path) -> None:
    with first(kind, tmp_path) as process:
        process.until_ready()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 0, process.output()


@pytest.mark.parametrize("kind", ["gateway", "engine", "gms"])
def test_a_signal_while_it_starts_is_not_lost(kind: str, tmp_path: Path) -> None:
    with first(kind, tmp_path) as process:
        process.until_held()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0, process.output()


@pytest.mark.parametrize("kind", KINDS)
def test_it_buries_what_others_leave_and_ends_when_told(kind: str, tmp_path: Path) -> None:
    orphan = "import os, sys\nif os.fork(): sys.exit()\nos.setsid()"
    with first(kind, tmp_path) as process:
        process.until_ready()
        if kind != "engine without a keeper":  # which does not
            for _ in range(3):
                enter = ["nsenter", "--target", str(process.pid), "--pid", sys.executable, "-c", orphan]
                subprocess.run(enter, check=True, timeout=DEADLINE_SECONDS)
            until(lambda: not process.zombies(), saying="no zombie is left")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0, process.output()
