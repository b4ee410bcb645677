"""With HOTSPARE_LOG_FORMAT=json every line of every process is an object, and all have the same fields."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import StartUp

pytestmark = pytest.mark.process

FIELDS = {"time", "level", "logger", "message", "pid"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def logs(start_up: StartUp) -> Callable[[str], list[dict[str, Any]]]:
    """The lines of one process, from a whole life of a pod and its gateway."""
    machine = start_up(HOTSPARE_LOG_FORMAT="json", HOTSPARE_LOG_LEVEL="debug")
    machine.until_complete()
    machine.up.signal(signal.SIGTERM)
    assert machine.up.wait() == 0

    def lines_of(process: str) -> list[dict[str, Any]]:
        name, _, part = process.partition("/")
        lines = [json.loads(line) for line in Path(machine.run_dir / "logs" / f"{name}.log").read_text().splitlines()]
        return [line for line in lines if line.get("process", name).partition("/")[2] == part]

    return lines_of


def check(lines: list[dict[str, Any]]) -> None:
    assert lines
    for line in lines:
        assert line.keys() >= FIELDS, line
        assert TIME.fullmatch(line["time"])
        assert line["level"] in ("debug", "info", "warning", "error", "critical")
        assert isinstance(line["pid"], int)


def test_the_pods_processes(logs: Callable[[str], list[dict[str, Any]]]) -> None:
    for process in ("pod-0", "pod-0/engine-a", "pod-0/engine-b", "pod-0/gms"):
        check(logs(process))
    assert len({line["pid"] for line in logs("pod-0/gms")} | {line["pid"] for line in logs("pod-0")}) == 2


def test_the_gateway(logs: Callable[[str], list[dict[str, Any]]]) -> None:
    check(logs("gateway"))
