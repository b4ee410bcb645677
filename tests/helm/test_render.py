"""Everything that the chart can render is what Kubernetes' own schemas take, for each version and by both Helms."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support import chart

CRDS = {
    "ServiceMonitor": {"selector", "endpoints"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
}
"""The Prometheus operator's kinds: there is no schema for them here. What is in their specs is held against this, and
what they refer to against the other objects (test_agreement.py); no more is known of them."""


@pytest.mark.parametrize("helm", chart.HELMS)
@pytest.mark.parametrize("case", ["default", "secured", "gpu"])
def test_lint_has_nothing_to_say(helm: str, case: str) -> None:
    values = str(chart.CASES / f"{case}.yaml")
    said = chart.run_helm(helm, "lint", "--strict", str(chart.CHART), "--values", values, "--kube-version", "1.34")
    assert "1 chart(s) linted, 0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@functools.cache
def valid(document: str, version: str) -> str:
    """The version whose schema the document, in JSON, fits; raises if it fits none, or its kind is unknown. Most
    objects are the same in many cases."""
    return kubernetes_validate.validate(json.loads(document), version, strict=True)


@pytest.mark.parametrize("case", chart.cases())
def test_every_object_fits_its_schema(case: str) -> None:
    for document in chart.of(case):
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            assert set(document["spec"]) == CRDS[document["kind"]]
        else:
            text = json.dumps(document, sort_keys=True)
            assert [valid(text, version) for version in chart.VERSIONS] == [*chart.VERSIONS]


@pytest.mark.parametrize("case", chart.cases())
def test_what_is_rendered_is_the_same_for_all_versions_and_by_both_helms(case: str) -> None:
    newest = [chart.of(case, chart.VERSIONS[-1], helm) for helm in chart.HELMS]
    assert [by_name(objects) for objects in newest] == [by_name(chart.of(case))] * 2


def by_name(objects: list[chart.Document]) -> dict[tuple[str, str], chart.Document]:
    return {(it["kind"], it["metadata"]["name"]): it for it in objects}


def test_an_object_that_does_not_fit_is_found() -> None:
    (service, *_) = [it for it in chart.of("default") if it["kind"] == "Service"]
    service["spec"]["portz"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="portz"):
        kubernetes_validate.validate(service, "1.34", strict=True)
    service["kind"] = "Servise"
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate(service, "1.34", strict=True)


@pytest.mark.parametrize("case", ["default", "secured"])
def test_without_gpus_an_older_cluster_will_do(case: str) -> None:
    assert by_name(chart.of(case, "1.30")) == by_name(chart.of(case))


@pytest.mark.parametrize("case", chart.cases())
def test_objects_are_of_the_namespace_and_have_names_of_their_own(case: str) -> None:
    objects = chart.of(case)
    assert {it["metadata"]["namespace"] for it in objects} == {chart.NAMESPACE}
    names = [(it["kind"], it["metadata"]["name"]) for it in objects]
    assert len(set(names)) == len(names)


ODD = """
image: {gateway: {repository: "12", tag: "30"}, worker: {repository: "12", tag: "30"}, pullSecrets: [{name: "1"}]}
nameOverride: "1"
fullnameOverride: "true"
apiKeys: {existingSecret: "2", key: "3", clientKey: "4"}
tls: {existingSecret: "true", ca: {existingSecret: "5", key: "6"}, serverName: "7"}
workerToken: {existingSecret: "false", key: "on"}
gateway: {priorityClassName: "8"}
worker: {priorityClassName: "9", tensorParallelSize: 2, shmSize: 1000000, scratchSize: 1000000}
monitoring: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}, prometheusRule: {enabled: true}}
"""
"""Names that YAML would take for something else than a text, wherever Kubernetes lets them be such."""


@pytest.mark.parametrize("helm", chart.HELMS)
@pytest.mark.parametrize(
    "more",
    [
        ["model.source=claim", "model.claim.existingClaim=1"],
        ["model.source=claim", "model.claim.create=true", "model.claim.storageClassName=1", "model.claim.size=1"],
        ["model.source=image", "model.image.reference=1"],
        ["gpu.enabled=true", "gpu.deviceClassName=1", "engine.name=a:B"],
        ["gateway.discovery=endpointslices", "tls.ca.existingSecret=", "tls.ca.existingConfigMap=1"],
    ],
)
def test_a_name_may_look_like_a_number(helm: str, more: list[str], tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(ODD)
    settings = [word for it in more for word in ("--set-string" if it.endswith("=1") else "--set", it)]
    where = ["--namespace", "123", "--kube-version", "1.35", "--values", str(values), *settings]
    objects = chart.documents(chart.run_helm(helm, "template", "1", str(chart.CHART), *where))
    for document in objects:
        for name in ("name", "namespace"):
            assert isinstance(document["metadata"][name], str), document["metadata"]
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(document, "1.35", strict=True)
    (endpoint,) = chart.kind(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "2", "key": "4"}
    assert endpoint["tlsConfig"]["serverName"] == "7"
    assert all(isinstance(it, str) for ca in endpoint["tlsConfig"]["ca"].values() for it in ca.values())
    (group,) = chart.kind(objects, "PrometheusRule")["spec"]["groups"]
    assert group["name"] == "true"


@pytest.mark.parametrize(
    ("release", "worker"),
    [
        ("hotspare", "hotspare-worker"),
        ("my-hotspare-2", "my-hotspare-2-worker"),
        ("a.b", "a-b-hotspare-worker"),
        ("x" * 53, f"{'x' * 40}-worker"),
    ],
)
def test_names_fit_what_they_name(release: str, worker: str) -> None:
    """A StatefulSet's pods carry its name with a hash of ten digits in a label of 63 characters."""
    objects = chart.documents(chart.run_helm("helm", "template", release, str(chart.CHART)))
    assert chart.kind(objects, "StatefulSet")["metadata"]["name"] == worker
    assert len(worker) <= 52
    for _, pod in chart.pods(objects):
        assert all(len(label) <= 63 for label in pod["metadata"]["labels"].values())
