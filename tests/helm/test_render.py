"""Everything that the chart can render is what Kubernetes' own schemas take, for each version and by both Helms."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
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
        ["engine.name=sim", "gateway.discovery=endpointslices", "tls.ca.existingSecret=", "tls.ca.existingConfigMap=1"],
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


EVERYTHING = """
apiKeys: {existingSecret: NAME, key: NAME, clientKey: NAME}
tls: {existingSecret: NAME, ca: {existingSecret: NAME, key: NAME}, serverName: NAME}
workerToken: {existingSecret: NAME, key: NAME}
nameOverride: NAME
commonLabels: {common: NAME}
image: {gateway: {repository: NAME, tag: NAME}, worker: {repository: NAME, tag: NAME}, pullSecrets: [{name: NAME}]}
engine: {name: NAME, servedModelName: NAME, dtype: NAME, engineArgs: NAME}
gpu: {enabled: true, deviceClassName: NAME, selectors: [NAME]}
gateway: &both
  autoscaling: {enabled: true, metric: inflight}
  priorityClassName: NAME
  podLabels: {pod: NAME}
  podAnnotations: {pod: NAME}
  serviceAccountAnnotations: {account: NAME}
  nodeSelector: {node: NAME}
  tolerations: [{key: NAME, value: NAME}]
  extraEnv: [{name: NAMED, value: NAME}]
  extraVolumes: [{name: extra, configMap: {name: NAME}}]
  extraVolumeMounts: [{name: extra, mountPath: /extra, subPath: NAME}]
worker: *both
networkPolicy: {metricsFrom: [{podSelector: {matchLabels: {app: NAME}}}]}
monitoring:
  labels: {prometheus: NAME}
  serviceMonitor: {enabled: true}
  podMonitor: {enabled: true}
  prometheusRule: {enabled: true, alertLabels: {team: NAME}}
"""
OF_MODELS = (
    "model: {source: claim, path: NAME, claim: {existingClaim: NAME}}",
    "model: {source: claim, claim: {create: true, storageClassName: NAME, dataSourceRef: {kind: A, name: NAME}}}",
    "model: {source: image, path: NAME, image: {reference: NAME}}",
)


def types(it: object, at: str = "") -> Iterator[tuple[str, type]]:
    match it:
        case dict():
            for name, below in it.items():
                yield from types(below, f"{at}.{name}")
        case list():
            for number, below in enumerate(it):
                yield from types(below, f"{at}[{number}]")
        case _:
            yield at, type(it)


@functools.cache
def rendered_with(name: str, helm: str, model: str) -> list[chart.Document]:
    """All there is, with that name wherever there is one."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as values:
        values.write(re.sub(r"\bNAME\b", f'"{name}"', EVERYTHING + model))
        values.flush()
        where = ["--namespace", name.replace(".", "-"), "--kube-version", "1.35", "--values", values.name]
        # A Service's name begins with a letter.
        full = ["--set-string", f"fullnameOverride={name if name[0].isalpha() else f'x-{name}'}"]
        return chart.documents(chart.run_helm(helm, "template", name, str(chart.CHART), *where, *full))


@pytest.mark.parametrize("helm", chart.HELMS)
@pytest.mark.parametrize("name", ["123", "true", "null", "on", "y", "0x1f", "1.5", "1e3", "2024-01-01", "0o7"])
@pytest.mark.parametrize("model", OF_MODELS)
def test_a_name_stays_a_text(helm: str, name: str, model: str) -> None:
    """Whatever YAML would take it for: everything has the types that it has with a name that is like no other thing."""
    objects = rendered_with(name, helm, model)
    assert dict(types(objects)) == dict(types(rendered_with("name", helm, model)))
    for _, pod in chart.pods(objects):
        assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == name
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            assert chart.selects(spread["labelSelector"]["matchLabels"], pod["metadata"]["labels"])
    for document in objects:
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            valid(json.dumps(document, sort_keys=True), "1.35")


@pytest.mark.parametrize("text", ["1", "on", "y"])
def test_the_loader_takes_for_something_else_what_kubernetes_does(text: str) -> None:
    (document,) = chart.documents(f"{{a: {text}, b: '{text}'}}")
    assert not isinstance(document["a"], str)
    assert document["b"] == text


def test_labels_of_the_values_are_there_once() -> None:
    """In YAML a key that is there twice is a mistake; the nearer value wins."""
    more = ["commonLabels.team=a", "gateway.podLabels.team=b", "monitoring.labels.team=c"]
    more += ["worker.podAnnotations.kubectl\\.kubernetes\\.io/default-container=engine-b"]
    more += ["monitoring.podMonitor.enabled=true"]
    manifest = chart.template("helm", "1.34", *(word for it in more for word in ("--set", it)))
    objects = chart.documents(manifest)
    labels = {owner.partition(" ")[0]: pod["metadata"]["labels"].get("team") for owner, pod in chart.pods(objects)}
    assert labels == {"Deployment": "b", "StatefulSet": "a", "Pod": "a"}
    assert chart.kind(objects, "PodMonitor")["metadata"]["labels"]["team"] == "c"
    assert manifest.count("default-container") == 1
    for block in re.findall(r"^( +)labels:\n((?:\1  .*\n)+)", manifest, re.MULTILINE):
        keys = re.findall(r"^\s+(\S+?):", block[1], re.MULTILINE)
        assert len(set(keys)) == len(keys)


def test_long_names_that_begin_alike_are_of_other_objects() -> None:
    releases = [f"{'x' * 45}-{end}" for end in "ab"]
    rendered = [chart.documents(chart.run_helm("helm", "template", it, str(chart.CHART))) for it in releases]
    names = [{it["metadata"]["name"] for it in objects} for objects in rendered]
    assert not names[0] & names[1]


def test_a_name_that_is_cut_ends_as_a_label_does() -> None:
    for name in (f"{'a' * 38}..b", f"{'a' * 39}-b", f"{'a' * 38}-.b"):
        objects = chart.documents(chart.template("helm", "1.34", "--set", f"nameOverride={name}"))
        for _, pod in chart.pods(objects):
            assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == name.rstrip("b").rstrip(".-")
        assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", it["metadata"]["name"]) for it in objects)


@pytest.mark.parametrize(
    ("release", "worker"),
    [
        ("hotspare", "hotspare-worker"),
        ("my-hotspare-2", "my-hotspare-2-worker"),
        ("a.b", "a-b-hotspare-worker"),
        ("x" * 53, f"{'x' * 31}-{hashlib.sha256(b'x' * 53 + b'-hotspare').hexdigest()[:8]}-worker"),
    ],
)
def test_names_fit_what_they_name(release: str, worker: str) -> None:
    """A StatefulSet's pods carry its name with a hash of ten digits in a label of 63 characters."""
    objects = chart.documents(chart.run_helm("helm", "template", release, str(chart.CHART)))
    assert chart.kind(objects, "StatefulSet")["metadata"]["name"] == worker
    assert len(worker) <= 52
    for _, pod in chart.pods(objects):
        assert all(len(label) <= 63 for label in pod["metadata"]["labels"].values())
