"""The Helm chart, rendered: by which Helm, with which values, for which Kubernetes; and what one asks of the result."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "hotspare"
TOOLS = ROOT / ".tools" / "bin"
CASES = ROOT / "tests" / "helm" / "values"
HELMS = ("helm", "helm3")
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
"""Of Kubernetes. What is rendered is the same for all of them, which a test holds; so most tests take the first."""
RELEASE, NAMESPACE = "demo", "llm"
TIMEOUT_SECONDS = 60

Document = dict[str, Any]


class Refused(Exception):
    """Helm would not render it; the message is what a person sees."""


def cases() -> list[str]:
    return sorted(path.stem for path in CASES.glob("*.yaml"))


def run_helm(helm: str, *arguments: str) -> str:
    """Raises Refused."""
    program = TOOLS / helm
    if not program.exists():
        raise AssertionError(f"{program} is missing: run make kube-tools")
    command = [str(program), *arguments]
    # Nothing of the person's own Helm: no settings, no plugins, no cache.
    environment = {name: f"/nonexistent/{name}" for name in ("HELM_CONFIG_HOME", "HELM_DATA_HOME", "HELM_CACHE_HOME")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env={**environment, "HOME": "/nonexistent"}
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


@functools.cache  # several tests look at the same
def rendered(case: str, version: str = "1.34", helm: str = "helm") -> str:
    """The manifest of one of the files in tests/helm/values."""
    return template(helm, version, "--values", str(CASES / f"{case}.yaml"))


def template(helm: str, version: str, *arguments: str, folder: Path = CHART) -> str:
    """Raises Refused."""
    return run_helm(
        helm, "template", RELEASE, str(folder), "--namespace", NAMESPACE, "--kube-version", version, *arguments
    )


class Loader(yaml.CSafeLoader):
    """Takes for something else than a text what Kubernetes' loader does: y, n and 1e3, beside what Python's does."""


Loader.add_implicit_resolver("!switch", re.compile(r"[yYnN]$"), list("yYnN"))
Loader.add_implicit_resolver("!number", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))
Loader.add_constructor("!switch", lambda loader, node: node.value in "yY")
Loader.add_constructor("!number", lambda loader, node: float(node.value))


def documents(manifest: str) -> list[Document]:
    return [document for document in yaml.load_all(manifest, Loader) if document]


@functools.cache
def _parsed(case: str, version: str, helm: str) -> list[Document]:
    return documents(rendered(case, version, helm))


def of(case: str, version: str = "1.34", helm: str = "helm") -> list[Document]:
    """The objects of a case; each call has its own."""
    return copy.deepcopy(_parsed(case, version, helm))


def kind(objects: list[Document], name: str, suffix: str = "") -> Document:
    """The one object of that kind (whose name ends so)."""
    (found,) = [it for it in objects if it["kind"] == name and it["metadata"]["name"].endswith(suffix)]
    return found


def pods(objects: list[Document]) -> Iterator[tuple[str, Document]]:
    """Name of the owner, and metadata and spec of the pod."""
    for it in objects:
        if it["kind"] in ("Deployment", "StatefulSet"):
            yield f"{it['kind']} {it['metadata']['name']}", it["spec"]["template"]
        elif it["kind"] == "Pod":
            yield f"Pod {it['metadata']['name']}", it


def containers(pod: Document) -> list[Document]:
    """Sidecars first, as they start."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def container(pod: Document, name: str) -> Document:
    (found,) = [it for it in containers(pod) if it["name"] == name]
    return found


def environment(it: Document) -> dict[str, str]:
    """What a container's process finds, a field of the pod as its path."""
    return {
        variable["name"]: variable["value"] if "value" in variable else f"{next(iter(variable['valueFrom']))}"
        for variable in it["env"]
    }


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


_UNITS = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}


def in_bytes(quantity: str) -> int:
    number = quantity.rstrip("KMGTi")
    return int(number) * _UNITS[quantity.removeprefix(number)]
