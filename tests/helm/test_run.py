"""The chart's containers as processes of this machine: what they are told is enough for them to find each other.

Each has its container's own arguments and variables; only ports, folders and the Service's name are this machine's.
What a container is beside that (users, limits, namespaces) is for tests that have containers.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support import chart
from tests.support.chart import container, containers, of, pods
from tests.support.machine import hotspare
from tests.support.processes import Process, until
from workers.ports import PortReservation

pytestmark = pytest.mark.process
FIELDS = {"metadata.name": "demo-hotspare-worker-0", "metadata.uid": "3a1f0c7e-0000-4000-8000-000000000000"}


class Cluster:
    """One gateway and one worker pod of a case."""

    def __init__(self, case: str, folder: Path, run_dirs: Path, stack: ExitStack) -> None:
        self._pods = {owner.rpartition("-")[2]: pod for owner, pod in pods(of(case))}
        self._folder, self._run_dirs, self._stack = folder, run_dirs, stack
        for owner in self._pods:  # open to all, as an emptyDir is
            (run_dirs / owner).mkdir()
            (run_dirs / owner).chmod(0o777)
        declared = [str(p["containerPort"]) for pod in self._pods.values() for it in containers(pod) for p in ports(it)]
        numbers = [str(stack.enter_context(PortReservation()).port) for _ in declared]
        self._ports = dict(zip(declared, numbers, strict=True))
        self.processes: dict[str, Process] = {}

    def start(self, owner: str, name: str) -> None:
        it = container(self._pods[owner], name)
        command = [sys.executable, "-m", "app.cli.main", *it["args"]]
        process = Process(name, command, env=self.environment(owner, name), log=self._folder / f"{name}.log")
        self._stack.callback(process.end)
        self.processes[name] = process

    def probe(self, owner: str, name: str, which: str) -> int:
        """The status that the kubelet would get; 0 if nobody answers."""
        it = container(self._pods[owner], name)
        asked = it[which]["httpGet"]
        (port,) = [str(port["containerPort"]) for port in ports(it) if port["name"] == asked["port"]]
        try:
            return httpx.get(
                f"http://127.0.0.1:{self._ports[port]}{asked['path']}", timeout=10, trust_env=False
            ).status_code
        except httpx.TransportError:
            assert self.processes[name].popen.poll() is None, self.processes[name].output()
            return 0

    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['8000']}"

    def environment(self, owner: str, name: str) -> dict[str, str]:
        it = container(self._pods[owner], name)
        variables = {}
        for variable in it["env"]:
            value = variable.get("value") or FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            variables[variable["name"]] = re.sub(r"\b\d+\b", lambda found: self._ports.get(found[0], found[0]), value)
        place = {
            "HOTSPARE_RUN_DIR": str(self._run_dirs / owner),
            "HOME": str(self._folder),
            "PYTHONPATH": str(chart.ROOT),
        }
        if "HOTSPARE_WORKERS_DNS" in variables:
            place["HOTSPARE_WORKERS_DNS"] = f"localhost:{self._ports['8100']}"
        return {**variables, **place}


def ports(it: chart.Document) -> list[chart.Document]:
    return it.get("ports", [])


@pytest.fixture
def cluster(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster("sim", tmp_path, tmp_path_factory.mktemp("run"), stack)


def test_engines_that_are_there_before_their_memory_service(cluster: Cluster) -> None:
    for name in ("engine-a", "engine-b"):
        cluster.start("worker", name)
    cluster.start("gateway", "gateway")
    for name in ("engine-a", "engine-b"):
        until(lambda name=name: cluster.probe("worker", name, "startupProbe") == 200, saying=f"{name} has started")
        assert cluster.probe("worker", name, "readinessProbe") == 503
    cluster.start("worker", "gms")
    until(lambda: cluster.probe("worker", "gms", "startupProbe") == 200, saying="the memory service has started")
    for owner, name in (("worker", "engine-a"), ("worker", "engine-b"), ("gateway", "gateway")):
        until(lambda at=(owner, name): cluster.probe(*at, "readinessProbe") == 200, saying=f"{name} is ready")
        assert cluster.probe(owner, name, "livenessProbe") == 200
    words = [{"role": "user", "content": "Hello"}]
    body = {"model": "sim", "messages": words}
    asked = httpx.post(f"{cluster.url()}/v1/chat/completions", json=body, timeout=40, trust_env=False)
    assert asked.status_code == 200, asked.text
    assert asked.json()["choices"][0]["finish_reason"]

    def look() -> subprocess.CompletedProcess[str] | None:  # as by kubectl exec
        shown = hotspare("status", env=cluster.environment("gateway", "gateway"))
        assert shown.stdout, shown.stderr
        return None if re.match(r"gateway \S+: silent", shown.stdout) else shown  # for who took over a second

    status = until(look, saying="the gateway answers")
    assert status.returncode == 0, status.stderr
    assert re.match(r"gateway \S+: ready, 0 in flight", status.stdout), status.stdout
    for name in ("gateway", "engine-a", "engine-b", "gms"):
        cluster.processes[name].signal(signal.SIGTERM)
    assert {name: process.wait() for name, process in cluster.processes.items()} == dict.fromkeys(cluster.processes, 0)
