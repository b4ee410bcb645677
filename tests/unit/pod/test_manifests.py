"""What the tests of real pods read from rendered manifests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.pod.manifests import cores, environment, expand, headless_names, pods_of, port_of, quantity
from tests.pod.probing import Probe

LABELS = {"app": "worker", "release": "r"}


def stateful_set(**spec: Any) -> dict[str, Any]:
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "w", "namespace": "n"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "worker"}},
            "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "engine"}], **spec}},
        },
    }


def service(name: str, *, selector: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {"kind": "Service", "metadata": {"name": name, "namespace": "n"}, "spec": {"selector": selector, **spec}}


def test_a_stateful_set_is_pods_with_ordinals() -> None:
    documents = [
        stateful_set(terminationGracePeriodSeconds=7),
        service("headless", selector={"app": "worker"}, clusterIP="None"),
        service("other", selector={"app": "gateway"}, clusterIP="None"),
        service("balanced", selector={"app": "worker"}),
    ]
    first, second = pods_of(documents, "StatefulSet")
    assert (first.name, second.name) == ("w-0", "w-1")
    assert first.uid != second.uid
    assert first.grace_seconds == 7
    assert first.aliases == headless_names(documents, LABELS) == ["headless.n.svc"]


def test_nothing_is_left_out_silently() -> None:
    with pytest.raises(ValueError, match="does not know hostPID"):
        pods_of([stateful_set(hostPID=True)], "StatefulSet")
    (pod, _) = pods_of([stateful_set(initContainers=[{"name": "init"}])], "StatefulSet")
    with pytest.raises(ValueError, match="init container init"):
        _ = pod.sidecars
    lonely = stateful_set()
    lonely["spec"]["selector"]["matchLabels"] = {"app": "other"}
    with pytest.raises(ValueError, match="does not select its own pods"):
        pods_of([lonely], "StatefulSet")


def test_variables() -> None:
    (pod, _) = pods_of([stateful_set()], "StatefulSet")
    env = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "PATH_OF_POD", "value": "/run/$(POD)/$(NOBODY)"},
        {"name": "EMPTY"},
    ]
    found = environment({"env": env}, pod)
    assert found == {"POD": "w-0", "PATH_OF_POD": "/run/w-0/$(NOBODY)", "EMPTY": ""}
    assert expand("--pod=$(POD)", found) == "--pod=w-0"


def test_numbers() -> None:
    assert [quantity(text) for text in ("5", "2k", "64Mi", "1Gi")] == [5, 2000, 64 << 20, 1 << 30]
    assert [cores(text) for text in ("250m", "2", 1.5)] == [0.25, 2.0, 1.5]
    with pytest.raises(ValueError, match="not a quantity"):
        quantity("1.5Gi")


def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    container = {
        "ports": [{"name": "admin", "containerPort": 8101}],
        "livenessProbe": {"httpGet": {"path": "/live", "port": "admin"}, "failureThreshold": 2},
    }
    assert port_of(container, 9) == 9
    assert Probe.of(container, "readiness") is None
    probe = Probe.of(container, "liveness")
    assert probe is not None
    assert (probe.scheme, probe.port, probe.path, probe.period, probe.grace) == ("http", 8101, "/live", 10, None)
    assert probe.due

    def refuse(url: str, **options: object) -> httpx.Response:
        assert url == "http://10.0.0.1:8101/live"
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "get", refuse)
    for failed in (False, True):
        assert not probe.ask("10.0.0.1")
        assert probe.failed is failed
    assert not probe.due
    for status, ok in ((200, True), (302, True), (503, False)):
        monkeypatch.setattr(httpx, "get", lambda url, status=status, **options: httpx.Response(status))
        assert probe.ask("10.0.0.1") is ok
