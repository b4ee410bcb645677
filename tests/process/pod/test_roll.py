"""``hotspare handover --restart-keepers``: its engines are replaced by others of a newer code, and it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.process.pod.sim_pods import COUNT, PROMPT, SimPod, supervised
from tests.support.processes import Process, gone, until
from workers.engines.sim.tokens import expected_text

pytestmark = pytest.mark.process

CODE = """
from workers.engines.sim.engine import SimEngine

class Engine(SimEngine):
    def __init__(self, *args):
        super().__init__(*args)
        self.models = ("{version}",)

    async def initialize(self):
        {initialize}
        await super().initialize()
"""


def install(folder: Path, version: str, initialize: str = "pass") -> None:
    """Unlike an installer's, files written within a second look alike to Python: so nothing compiled is kept."""
    (folder / "rolling.py").write_text(CODE.format(version=version, initialize=initialize))


def rolling(pod: SimPod) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli.main", "handover", "pod-0", "--restart-keepers"]
    command += ["--run-dir", str(pod.folder.parent)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    return subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def served(pod: SimPod) -> str:
    answer = httpx.get(f"http://127.0.0.1:{pod.serving}/v1/models", timeout=5, trust_env=False)
    return str(answer.json()["data"][0]["id"])


@pytest.mark.timeout(100)
def test_all_engines_are_replaced_while_the_pod_serves(pod: SimPod, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    install(code, "old")
    env = {"HOTSPARE_ENGINE": "rolling:Engine", "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}
    with supervised(pod, tmp_path, **env) as process:
        active, spare = pod.until_pair()
        assert served(pod) == "old"
        install(code, "new")
        with rolling(pod) as roll:
            assert roll.wait(50) == 0
            said = roll.communicate()[0].splitlines()
        assert len(said) == 3, said
        process.until_said(told := "was told to stop, and is started again at once", times=2)
        assert process.output().count(told) == 2
        assert "is gone (exit code 0)" not in process.output()
        again, other = pod.until_pair()
        assert (again["engine"], other["engine"]) == (spare["engine"], active["engine"])
        assert again["epoch"] == active["epoch"] + 1
        assert not {again["keeper_pid"], other["keeper_pid"]} & {active["keeper_pid"], spare["keeper_pid"]}
        assert (served(pod), pod.complete()) == ("new", expected_text(PROMPT, COUNT))
        assert all(gone(state["keeper_pid"]) for state in (active, spare))
        one_that_does_not_start(pod, process, code, again["pid"])


def one_that_does_not_start(pod: SimPod, process: Process, code: Path, serving: int) -> None:
    """Then the active engine serves on, and with an older code again there is a spare."""
    install(code, "broken", initialize="raise RuntimeError('this version is broken')")
    with rolling(pod) as roll:
        try:
            until(lambda: "this version is broken" in process.output(), saying="the new engine fails")
            state = pod.active()
            assert state is not None
            assert (state["pid"], served(pod)) == (serving, "new")
            install(code, "mended")
            assert roll.wait(50) == 0
        finally:
            roll.kill()
    assert served(pod) == "mended"
