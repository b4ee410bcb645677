"""The chart's pods under podman: images, network and pods, made once for the tests of a file and gone after them.

Everything is skipped, and says why, where podman cannot be had (scripts/podman.sh exits with 3).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pod.fleet import Fleet
from tests.pod.podman import ROOT, Podman

HELM = ROOT / ".tools" / "bin" / "helm"
CANNOT = 3
VALUES = Path(__file__).with_name("values.yaml")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def podman() -> Podman:
    done = run("scripts/podman.sh")
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Podman()


@pytest.fixture(scope="session")
def images(podman: Podman) -> None:
    """Gateway and worker, without vLLM, built from this checkout (what did not change comes from podman's cache)."""
    done = run("scripts/pod_images.sh")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def manifests() -> list[dict[str, Any]]:
    """What the chart renders."""
    tools = run(sys.executable, "scripts/kube_tools.py")
    assert tools.returncode == 0, tools.stderr
    done = run(str(HELM), "template", "hotspare", "helm/hotspare", "--values", str(VALUES))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module")  # not for longer: the kubelet's threads open sockets in this process
def fleet(podman: Podman, images: None, manifests: list[dict[str, Any]]) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(podman, manifests))
        fleet.start("gateway-0", "worker-0")
        yield fleet
