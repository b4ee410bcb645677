"""Values that cannot be meant: refused when the chart is rendered, with a sentence that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import chart

WRONG = """
apiKeys: {clientKey: a b}
engine: {kvCacheBytes: 512Mi, maxModelLen: 8}
gateway: {replica: 3, discovery: static, service: {port: 70000}, drainTimeoutSeconds: 1.5}
image: {worker: {digest: "sha256:12"}}
log: {level: verbose}
model: {source: hub, path: /models}
monitoring: {interval: often}
podSecurityContext: {runAsUser: 0, runAsNonRoot: false}
worker:
  shadows: 8
  tensorParallelSize: 0
  gms: {weights: 1.5Gi}
  podDisruptionBudget: {maxUnavailable: 200%}
  extraEnv: [{name: A B}, {name: A, value: 1}]
"""
SENTENCES = {
    "helm": """
at '/apiKeys/clientKey': 'a b' does not match pattern '^[A-Za-z0-9._-]*$'
at '/engine/kvCacheBytes': got string, want integer
at '/engine/maxModelLen': minimum: got 8, want 16
at '/gateway': additional properties 'replica' not allowed
at '/gateway/discovery': value must be one of 'dns', 'endpointslices'
at '/gateway/drainTimeoutSeconds': got number, want integer
at '/gateway/service/port': maximum: got 70,000, want 65,535
at '/image/worker/digest': 'sha256:12' does not match pattern '^(sha256:[0-9a-f]{64})?$'
at '/log/level': value must be one of 'debug', 'info', 'warning', 'error'
at '/model/path': '/models' does not match pattern '^([A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?$'
at '/model/source': value must be one of 'embedded', 'claim', 'image'
at '/monitoring/interval': 'often' does not match pattern '^([0-9]+(ms|s|m|h|d))+$'
at '/podSecurityContext/runAsNonRoot': value must be true
at '/podSecurityContext/runAsUser': minimum: got 0, want 1
at '/worker/extraEnv/0/name': 'A B' does not match pattern '^[A-Za-z_][A-Za-z0-9_]*$'
at '/worker/extraEnv/1/value': got number, want string
at '/worker/gms/weights': '1.5Gi' does not match pattern '^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?$'
at '/worker/podDisruptionBudget/maxUnavailable': '200%' does not match pattern '^(100|[0-9]{1,2})%$'
at '/worker/shadows': maximum: got 8, want 7
at '/worker/tensorParallelSize': minimum: got 0, want 1
""",
    "helm3": """
apiKeys.clientKey: Does not match pattern '^[A-Za-z0-9._-]*$'
engine.kvCacheBytes: Invalid type. Expected: integer, given: string
engine.maxModelLen: Must be greater than or equal to 16
gateway.discovery: gateway.discovery must be one of the following: "dns", "endpointslices"
gateway.drainTimeoutSeconds: Invalid type. Expected: integer, given: number
gateway.service.port: Must be less than or equal to 65535
gateway: Additional property replica is not allowed
image.worker.digest: Does not match pattern '^(sha256:[0-9a-f]{64})?$'
log.level: log.level must be one of the following: "debug", "info", "warning", "error"
model.path: Does not match pattern '^([A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*)?$'
model.source: model.source must be one of the following: "embedded", "claim", "image"
monitoring.interval: Does not match pattern '^([0-9]+(ms|s|m|h|d))+$'
podSecurityContext.runAsNonRoot: podSecurityContext.runAsNonRoot does not match: true
podSecurityContext.runAsUser: Must be greater than or equal to 1
worker.extraEnv.0.name: Does not match pattern '^[A-Za-z_][A-Za-z0-9_]*$'
worker.extraEnv.1.value: Invalid type. Expected: string, given: integer
worker.gms.weights: Does not match pattern '^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?$'
worker.podDisruptionBudget.maxUnavailable: Does not match pattern '^(100|[0-9]{1,2})%$'
worker.shadows: Must be less than or equal to 7
worker.tensorParallelSize: Must be greater than or equal to 1
""",
}
"""For each mistake in WRONG one line."""


@pytest.mark.parametrize("helm", chart.HELMS)
def test_by_the_schema(helm: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(WRONG)
    with pytest.raises(chart.Refused, match="values don't meet the specifications of the schema") as caught:
        chart.template(helm, "1.34", "--values", str(values))
    said = [line.strip().removeprefix("- ") for line in str(caught.value).splitlines()[2:]]
    assert sorted(line for line in said if line and not line.endswith("validation failed")) == sorted(
        SENTENCES[helm].strip().splitlines()
    )


def refusal(helm: str, *settings: str, version: str = "1.34") -> str:
    arguments = [part for setting in settings for part in ("--set-json" if "=[" in setting else "--set", setting)]
    with pytest.raises(chart.Refused) as caught:
        chart.template(helm, version, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "version", "sentence"),
    [
        (
            ["gpu.enabled=true"],
            "1.33",
            "gpu.enabled needs dynamic resource allocation as Kubernetes 1.34 has it (resource.k8s.io/v1), and this is "
            "v1.33; use a newer cluster (helm template: --kube-version 1.34), or leave gpu.enabled off",
        ),
        (
            ["gpu.enabled=true", "engine.name=sim"],
            "1.34",
            "engine.name sim computes on the CPU; leave gpu.enabled off, or choose another engine",
        ),
        (
            ["gpu.enabled=true", "worker.tensorParallelSize=2"],
            "1.34",
            "worker.tensorParallelSize is 2: on a GPU this version's vLLM engine has one rank and refuses more; set it "
            "to 1",
        ),
        (
            ["gateway.drainTimeoutSeconds=60"],
            "1.34",
            "gateway.terminationGracePeriodSeconds is 60, and 70 are needed: gateway.preStopSleepSeconds (5), "
            "gateway.drainTimeoutSeconds (60) and 5 to end; lengthen the one or shorten the others",
        ),
        (
            ["worker.shutdownTimeoutSeconds=900"],
            "1.34",
            "worker.terminationGracePeriodSeconds is 60, and 920 are needed: worker.shutdownTimeoutSeconds (900), "
            "worker.engineShutdownSeconds (10) and 10 to end; lengthen the one or shorten the others",
        ),
        (
            ["worker.shutdownTimeoutSeconds=10", "worker.gracePeriodSeconds=11"],
            "1.34",
            "worker.gracePeriodSeconds (11) is a part of worker.shutdownTimeoutSeconds (10) and cannot be longer; "
            "shorten the one or lengthen the other",
        ),
        (
            ["worker.terminationGracePeriodSeconds=22"],
            "1.34",
            "worker.terminationGracePeriodSeconds (22) leaves 2 seconds for requests, after "
            "worker.engineShutdownSeconds (10) and 10 to end, and worker.gracePeriodSeconds (5) is a part of them; "
            "lengthen the first or shorten the others",
        ),
        (
            ["worker.autoscaling.enabled=true", "worker.autoscaling.minReplicas=5"],
            "1.34",
            "worker.autoscaling.minReplicas (5) is more than maxReplicas (4)",
        ),
        (
            ["model.source=claim"],
            "1.34",
            "model.source is claim, and there is none: name one with model.claim.existingClaim, or have one made with "
            "model.claim.create",
        ),
        (
            ["model.source=claim", "model.claim.create=true", "model.claim.existingClaim=models"],
            "1.34",
            "model.claim.create makes a claim, and model.claim.existingClaim names models: choose one of them",
        ),
        (["model.source=image"], "1.35", "model.source is image: name it with model.image.reference"),
        (
            ["model.source=image", "model.image.reference=a:1"],
            "1.32",
            "model.source image needs Kubernetes 1.33 or newer (before 1.35 with the feature gate ImageVolume), and "
            "this is v1.32; use model.source claim",
        ),
        (
            ["monitoring.serviceMonitor.enabled=true", "apiKeys.existingSecret=keys"],
            "1.34",
            "monitoring.serviceMonitor needs a key for the gateways' metrics: put one of the keys alone under a key of "
            "the Secret, and name that with apiKeys.clientKey",
        ),
        (
            ["fullnameOverride=1st"],
            "1.34",
            "objects would be called 1st-..., and a Service's name begins with a letter: set fullnameOverride",
        ),
        (
            ["tls.existingSecret=a", "tls.ca.existingSecret=b", "tls.ca.existingConfigMap=c"],
            "1.34",
            "tls.ca names a Secret (b) and a ConfigMap (c): choose one of them",
        ),
        (
            ["tls.ca.existingSecret=b"],
            "1.34",
            "tls.ca and tls.serverName say how the gateways' certificate is verified, and there is none: set "
            "tls.existingSecret",
        ),
        (
            ["gateway.autoscaling.enabled=true", "gateway.resources.requests.cpu=null"],
            "1.34",
            "gateway.autoscaling.metric is cpu, which is measured against what is requested: set "
            "gateway.resources.requests.cpu",
        ),
        (
            [
                "worker.autoscaling.enabled=true",
                "worker.autoscaling.metric=cpu",
                "worker.gms.resources.requests.memory=2Gi",
            ],
            "1.34",
            "worker.autoscaling.metric is cpu, which is measured against what is requested: set "
            "worker.gms.resources.requests.cpu",
        ),
        (
            ['gateway.extraEnv=[{"name": "HOTSPARE_PORT", "value": "1"}]'],
            "1.34",
            "gateway.extraEnv sets HOTSPARE_PORT, which the chart sets from its values; use those (helm show values)",
        ),
        (
            ['worker.extraEnv=[{"name": "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "value": "1"}]'],
            "1.34",
            "extraEnv sets DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS, and the chart sets the same from "
            "worker.shutdownTimeoutSeconds, which would win; use that",
        ),
        (
            ['worker.extraEnv=[{"name": "HOTSPARE_GMS_MEMORY_LIMIT", "value": "1"}]'],
            "1.34",
            "worker.extraEnv sets HOTSPARE_GMS_MEMORY_LIMIT, which the chart sets from its values; use those (helm "
            "show values)",
        ),
    ],
)
def test_by_the_template(settings: list[str], version: str, sentence: str) -> None:
    assert f": {sentence}\n" in refusal("helm", *settings, version=version)


def test_by_the_template_of_the_older_helm() -> None:
    assert ": model.source is claim, and there is none: name one" in refusal("helm3", "model.source=claim")


@pytest.mark.parametrize("helm", chart.HELMS)
def test_a_cluster_that_is_too_old(helm: str) -> None:
    assert ">=1.30.0-0" in refusal(helm, version="1.29")
