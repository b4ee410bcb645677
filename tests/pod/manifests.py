"""Rendered manifests as what a kubelet is given: pods with names, addresses of their own to come, and their volumes.

This is the part of the control plane that the tests need: a StatefulSet is pods with ordinals, a Deployment pods with
some suffix, a headless Service a name for the pods that its selector fits, and fields of a pod become variables.
Nothing is decided here, and what is not understood is an error: a manifest must not be tested with a part left out.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = Mapping[str, Any]

WITHOUT_EFFECT = frozenset(
    {
        # of scheduling, identity and pulling
        "affinity", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "nodeSelector",
        "priorityClassName", "serviceAccountName", "tolerations", "topologySpreadConstraints",
        # read here
        "containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds", "restartPolicy",
    }
)  # fmt: skip
"""Fields of a pod's spec that this module reads, or that mean nothing on one machine."""


@dataclass(frozen=True)
class PodManifest:
    """One pod. ``aliases`` are the names of headless Services that select it."""

    name: str
    namespace: str
    uid: str
    labels: Mapping[str, str]
    spec: Document
    aliases: Sequence[str] = field(default=())

    @property
    def sidecars(self) -> list[Document]:
        """Init containers that stay (restartPolicy Always): started before the others, one by one, and ended after."""
        found = list(self.spec.get("initContainers", ()))
        for container in found:
            if container.get("restartPolicy") != "Always":
                raise ValueError(f"init container {container['name']} runs to its end; nothing here does that yet")
        return found

    @property
    def containers(self) -> list[Document]:
        return list(self.spec["containers"])

    @property
    def grace_seconds(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))


def pods_of(documents: Sequence[Document], kind: str) -> list[PodManifest]:
    """The pods of the only Deployment or StatefulSet, all of its replicas."""
    (owner,) = [document for document in documents if document["kind"] == kind]
    template, meta = owner["spec"]["template"], owner["metadata"]
    unknown = set(template["spec"]) - WITHOUT_EFFECT
    if unknown:
        raise ValueError(f"{kind} {meta['name']}: the tests' kubelet does not know {', '.join(sorted(unknown))}")
    labels = template["metadata"]["labels"]
    wanted = owner["spec"]["selector"]["matchLabels"]
    if not wanted.items() <= labels.items():
        raise ValueError(f"{kind} {meta['name']} does not select its own pods")
    return [
        PodManifest(
            name=f"{meta['name']}-{ordinal}",
            namespace=meta["namespace"],
            uid=str(uuid.uuid4()),
            labels=labels,
            spec=template["spec"],
            aliases=headless_names(documents, labels),
        )
        for ordinal in range(owner["spec"].get("replicas", 1))
    ]


def headless_names(documents: Sequence[Document], labels: Mapping[str, str]) -> list[str]:
    """Under which names a cluster's DNS would have a pod with these labels."""
    return [
        f"{document['metadata']['name']}.{document['metadata']['namespace']}.svc"
        for document in documents
        if document["kind"] == "Service"
        and document["spec"].get("clusterIP") == "None"
        and document["spec"]["selector"].items() <= labels.items()
    ]


def environment(container: Document, pod: PodManifest) -> dict[str, str]:
    """The variables of a container."""
    fields = {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "metadata.uid": pod.uid}
    found: dict[str, str] = {}
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = expand(str(variable.get("value", "")), found)
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)``, as in a container's arguments and variables; an unknown one stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def port_of(container: Document, port: str | int) -> int:
    """A port by its number, or by its name in the container."""
    if isinstance(port, int):
        return port
    (number,) = [int(entry["containerPort"]) for entry in container["ports"] if entry["name"] == port]
    return number


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity."""
    factors = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    found = re.fullmatch(r"([0-9]+)([a-zA-Z]*)", str(text))
    if found is None:
        raise ValueError(f"not a quantity of bytes: {text}")
    return int(found[1]) * factors[found[2]]


def cores(text: str | float) -> float:
    """Of a CPU quantity: ``250m`` is a quarter."""
    return float(str(text)[:-1]) / 1000 if str(text).endswith("m") else float(text)
