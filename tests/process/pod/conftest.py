from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.pod.pods import Pod, StartPod
from tests.process.pod.sim_pods import SimPod
from tests.support.processes import gone
from workers.ports import PortReservation


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start_pod(tmp_path: Path, run_dir: Path, live_ports: tuple[int, int]) -> Iterator[StartPod]:
    """Starts pods of stand-ins; whatever a test did, nothing of them is left at its end."""
    with ExitStack() as stack:

        def start(
            gms: list[str] | None = None, a: list[str] | None = None, b: list[str] | None = None, **env: str
        ) -> Pod:
            standins = {"gms": gms or [], "engine-a": a or [], "engine-b": b or []}
            ports = ",".join(str(port) for port in live_ports)
            pod = Pod(run_dir, tmp_path, standins, {"HOTSPARE_ADMIN_PORTS": ports, **env})
            stack.callback(_end, pod)
            return pod

        yield start


@pytest.fixture
def live_ports() -> Iterator[tuple[int, int]]:
    """The engines' admin ports: nobody else's, and closed until a stand-in listens."""
    with PortReservation() as one, PortReservation() as other:
        yield one.port, other.port


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[SimPod]:
    """A pod of sim engines, not started."""
    with ExitStack() as stack:
        ports = [stack.enter_context(PortReservation()).port for _ in range(3)]
        yield SimPod(tmp_path / "run", ports)


def _end(pod: Pod) -> None:
    """The stand-ins die with their supervisor; what they started must be gone by then."""
    pod.process.end()
    started = re.findall(r"grandchild (\d+)$", pod.process.output(), re.MULTILINE)
    left = [pid for pid in map(int, started) if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
