"""What `helm test` runs, as the chart has it, against a gateway with sim workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import chart
from tests.support.machine import Machine

pytestmark = pytest.mark.process
KEY = "sk-of-the-tests"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ask")
    machine = Machine(folder / "run", folder, (), {"HOTSPARE_API_KEYS": KEY})
    try:
        yield machine.until_ready()
    finally:
        machine.end()


def ask(url: str, *, key: str, seconds: int) -> subprocess.CompletedProcess[str]:
    container = chart.kind(chart.of("default"), "Pod")["spec"]["containers"][0]
    assert container["command"] == ["/opt/hotspare/bin/python", "-c"]
    command = [sys.executable, "-c", *container["args"]]
    environment = {"URL": url, "KEY": key, "SECONDS": str(seconds)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_an_answer(url: str) -> None:
    done = ask(url, key=KEY, seconds=30)
    assert done.returncode == 0, done.stderr
    assert "models: sim\n" in done.stdout
    assert '"finish_reason"' in done.stdout


def test_a_wrong_key(url: str) -> None:
    done = ask(url, key="sk-another", seconds=30)
    assert done.returncode == 1
    assert "invalid_api_key" in done.stderr
    assert "Is apiKeys.clientKey set" in done.stderr


def test_nobody_there() -> None:
    done = ask("http://127.0.0.1:1", key="", seconds=0)
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert "no answer in time; look at the gateways' and the workers' logs" in done.stderr
