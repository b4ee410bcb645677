"""Values that cannot be meant: refused when the chart is rendered, with a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

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
        (
            ['gateway.extraEnv=[{"name": "hotspare_port", "value": "1"}]'],
            "1.34",
            "gateway.extraEnv sets hotspare_port, which the chart sets from its values; use those (helm show values)",
        ),
        (
            ['gateway.extraEnv=[{"name": "HOTSPARE_NONSENSE", "value": "1"}]'],
            "1.34",
            "gateway.extraEnv sets HOTSPARE_NONSENSE, which is no setting for gateway pods: all names are in "
            "docs/settings.md",
        ),
        (
            ['gateway.extraEnv=[{"name": "HOTSPARE_SIM_TOKEN_SECONDS", "value": "1"}]'],
            "1.34",
            "gateway.extraEnv sets HOTSPARE_SIM_TOKEN_SECONDS, which is no setting for gateway pods: all names are in "
            "docs/settings.md",
        ),
        (
            ['worker.extraEnv=[{"name": "HOTSPARE_PARENT_PID", "value": "1"}]'],
            "1.34",
            "worker.extraEnv sets HOTSPARE_PARENT_PID, which is no setting for worker pods: all names are in "
            "docs/settings.md",
        ),
        (
            ['gateway.extraEnv=[{"name": "HOTSPARE_WORKERS_FILE", "value": "/a"}]'],
            "1.34",
            "gateway.extraEnv sets HOTSPARE_WORKERS_FILE, and a gateway finds workers in one way only: choose it with "
            "gateway.discovery",
        ),
        (
            ['gateway.extraEnv=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]'],
            "1.34",
            "gateway.extraEnv sets A twice",
        ),
        (
            ['worker.extraEnv=[{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]'],
            "1.34",
            "worker.extraEnv gives A a value and valueFrom: choose one of them",
        ),
        (
            ["worker.gms.weights=99999999Ti"],
            "1.34",
            "worker.gms.weights is 99999999Ti, which is more than a container can have: the most is 1024Ti",
        ),
        (
            ["worker.gms.margin=9999999999999999999999G"],
            "1.34",
            "worker.gms.margin is 9999999999999999999999G, which is more than a container can have: the most is 1024Ti",
        ),
        (["worker.scratchSize=0"], "1.34", "worker.scratchSize is 0, which is no size: set one, such as 4Gi"),
        (["worker.shmSize=0Mi"], "1.34", "worker.shmSize is 0Mi, which is no size: set one, such as 4Gi"),
        (
            ["worker.tensorParallelSize=2"],
            "1.34",
            "worker.tensorParallelSize is 2, and the embedded model has 9 attention heads and 3 for keys and values, "
            "which cannot be shared between so many devices; set it to 1, or choose another model with model.source",
        ),
        (
            ["gateway.service.nodePort=30080"],
            "1.34",
            "gateway.service.nodePort is 30080, and a Service of the type ClusterIP has no port on the nodes: set "
            "gateway.service.type, or leave nodePort 0",
        ),
        (
            ["worker.updateStrategy.type=OnDelete", "worker.updateStrategy.rollingUpdate.partition=1"],
            "1.34",
            "worker.updateStrategy.rollingUpdate is for the type RollingUpdate: leave it out, or choose that type",
        ),
        (
            [r"commonLabels.app\.kubernetes\.io/name=x"],
            "1.34",
            "commonLabels sets app.kubernetes.io/name, which is a label of the chart's own: choose another name",
        ),
        (
            [r"gateway.podLabels.app\.kubernetes\.io/component=x"],
            "1.34",
            "gateway.podLabels sets app.kubernetes.io/component, which is a label of the chart's own: choose another "
            "name",
        ),
        (
            [r"monitoring.labels.helm\.sh/chart=x"],
            "1.34",
            "monitoring.labels sets helm.sh/chart, which is a label of the chart's own: choose another name",
        ),
        (
            ["monitoring.prometheusRule.alertLabels.severity=low"],
            "1.34",
            "monitoring.prometheusRule.alertLabels sets severity, which each alert has of its own: choose another name",
        ),
        (
            ['worker.extraVolumes=[{"name": "data"}, {"name": "data"}]'],
            "1.34",
            "worker.extraVolumes has a volume data, and another one of that name: choose another name",
        ),
        (
            ['worker.extraVolumeMounts=[{"name": "data", "mountPath": "/data"}]'],
            "1.34",
            "worker.extraVolumeMounts mounts data, and there is no volume of that name: add it to worker.extraVolumes",
        ),
        (
            [
                'gateway.extraVolumes=[{"name": "data"}]',
                'gateway.extraVolumeMounts=[{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/a/"}]',
            ],
            "1.34",
            "gateway.extraVolumeMounts mounts data at /a/, and another one there: choose another path",
        ),
    ],
)
def test_by_the_template(settings: list[str], version: str, sentence: str) -> None:
    assert f": {sentence}\n" in refusal("helm", *settings, version=version)


@pytest.mark.parametrize("case", ["secured", "ranks", "gpu"])
def test_volumes_of_the_charts_own_are_not_taken(case: str) -> None:
    values = str(chart.CASES / f"{case}.yaml")

    def said(*settings: str) -> str:
        more = [word for setting in settings for word in ("--set-json", setting)]
        with pytest.raises(chart.Refused) as caught:
            chart.template("helm", "1.34", "--values", values, *more)
        return str(caught.value)

    seen = 0
    for owner, pod in chart.pods(chart.of(case)):
        component = {"Deployment": "gateway", "StatefulSet": "worker"}.get(owner.partition(" ")[0])
        if component is None:
            continue
        for volume in pod["spec"]["volumes"]:
            assert (
                f"{component}.extraVolumes has a volume {volume['name']}, and the chart has one of that name"
                in said(f'{component}.extraVolumes=[{{"name": "{volume["name"]}"}}]')
            )
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            seen += 1
            assert f"at {mount['mountPath']}, and the chart mounts a volume there: choose another path" in said(
                f'{component}.extraVolumes=[{{"name": "data"}}]',
                f'{component}.extraVolumeMounts=[{{"name": "data", "mountPath": "{mount["mountPath"]}"}}]',
            )
    assert seen >= 5


def test_what_may_be_added() -> None:
    """Settings of both processes, an upper-case annotation, a folder in one of the chart's, a volume in two places."""
    variables = ["HOTSPARE_GMS_CHUNK_SIZE", "HOTSPARE_BEAT_TIMEOUT_SECONDS", "hotspare_drain_mode", "HTTPS_PROXY"]
    env = ", ".join(f'{{"name": "{name}", "value": "1"}}' for name in variables)
    chart.template(
        "helm", "1.34",
        "--set-json", f"worker.extraEnv=[{env}]",
        "--set", r"worker.podAnnotations.Example\.com/a=any words",
        "--set-json", 'worker.extraVolumes=[{"name": "data", "emptyDir": {}}]',
        "--set-json", 'worker.extraVolumeMounts=[{"name": "data", "mountPath": "/tmp/data"}, '
        '{"name": "run", "mountPath": "/more"}]',
    )  # fmt: skip


def test_another_model_may_have_ranks() -> None:
    ranks = ("--set", "worker.tensorParallelSize=2")
    chart.template("helm", "1.34", *ranks, "--set", "engine.name=sim")
    chart.template("helm", "1.34", *ranks, "--set-json", 'worker.extraEnv=[{"name": "HOTSPARE_MODEL", "value": "/a"}]')


@pytest.mark.parametrize("helm", chart.HELMS)
def test_a_cache_that_no_sum_could_bear(helm: str) -> None:
    said = refusal(helm, f"engine.kvCacheBytes={(1 << 63) - 1}")
    assert "engine" in said
    assert "kvCacheBytes" in said
    assert "memory: -" not in said


def test_the_largest_sizes_are_counted() -> None:
    sizes = ("worker.gms.weights=1024Ti", "worker.gms.margin=00001024Ti", f"engine.kvCacheBytes={1 << 50}")
    objects = chart.documents(
        chart.template(
            "helm", "1.34", *(word for size in sizes for word in ("--set-string" if "Ti" in size else "--set", size))
        )
    )
    (pod,) = [pod for owner, pod in chart.pods(objects) if owner.startswith("StatefulSet")]
    assert chart.container(pod, "gms")["resources"]["limits"]["memory"] == f"{3 * (1 << 50) >> 20}Mi"


NOT_KUBERNETES = """
commonLabels: {a: b c}
gateway:
  podLabels: {-bad: x}
  tolerations: [{keys: a}]
  topologySpreadConstraints: [{maxSkew: 0, topologyKey: a, whenUnsatisfiable: ScheduleAnyway, more: 1}]
  affinity: {nodeAfinity: {}}
worker:
  updateStrategy: {type: foo, more: 1, rollingUpdate: {partition: -1}}
  extraVolumes: [{emptyDir: {}}]
  extraVolumeMounts: [{name: a, path: /a, mountPath: a}]
  podAnnotations: {a b: c}
  nodeSelector: {a: -b}
monitoring: {prometheusRule: {alertLabels: {a.b: c}}}
"""


REFUSED = """
at '/commonLabels/a': 'b c' does not match pattern '^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$'
at '/gateway/affinity': additional properties 'nodeAfinity' not allowed
at '/gateway/podLabels': additional properties '-bad' not allowed
at '/gateway/tolerations/0': additional properties 'keys' not allowed
at '/gateway/topologySpreadConstraints/0': additional properties 'more' not allowed
at '/gateway/topologySpreadConstraints/0/maxSkew': minimum: got 0, want 1
at '/monitoring/prometheusRule/alertLabels': additional properties 'a.b' not allowed
at '/worker/extraVolumeMounts/0': additional properties 'path' not allowed
at '/worker/extraVolumeMounts/0/mountPath': 'a' does not match pattern '^/[^:]*$'
at '/worker/extraVolumes/0': missing property 'name'
at '/worker/nodeSelector/a': '-b' does not match pattern '^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$'
at '/worker/podAnnotations': additional properties 'a b' not allowed
at '/worker/updateStrategy': additional properties 'more' not allowed
at '/worker/updateStrategy/rollingUpdate/partition': minimum: got -1, want 0
at '/worker/updateStrategy/type': value must be one of 'RollingUpdate', 'OnDelete'
"""


def test_what_kubernetes_would_refuse(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(NOT_KUBERNETES)
    with pytest.raises(chart.Refused) as caught:
        chart.template("helm", "1.34", "--values", str(values))
    said = [line.strip().removeprefix("- ") for line in str(caught.value).splitlines()[2:]]
    assert sorted(line for line in said if line and not line.endswith("validation failed")) == sorted(
        REFUSED.strip().splitlines()
    )
    with pytest.raises(chart.Refused) as caught:
        chart.template("helm3", "1.34", "--values", str(values))
    said = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert len(said) == len(REFUSED.strip().splitlines()), said


def paths(values: chart.Document, above: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield above + name
        if isinstance(value, dict):
            yield from paths(value, f"{above}{name}.")


EVERYTHING = """
apiKeys: {existingSecret: a, clientKey: b}
tls: {existingSecret: c, ca: {existingSecret: c}}
workerToken: {existingSecret: d}
gpu: {enabled: true}
model: {source: claim, claim: {create: true}}
gateway: {autoscaling: {enabled: true}}
worker: {autoscaling: {enabled: true, metric: cpu}}
monitoring: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}, prometheusRule: {enabled: true}}
"""


@pytest.mark.parametrize("section", yaml.safe_load((chart.CHART / "values.yaml").read_text()))
def test_no_value_is_missed_without_a_sentence(section: str, tmp_path: Path) -> None:
    """null takes a value away. Then the schema or checks.yaml say so, or it is not needed."""
    (tmp_path / "values.yaml").write_text(EVERYTHING)
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    for path in paths({section: defaults[section]}):
        settings = ["--values", str(tmp_path / "values.yaml"), "--set", f"{path}=null"]
        try:
            manifest = chart.template("helm", "1.35", *settings)
        except chart.Refused as refused:
            said = str(refused)
            assert "values don't meet the specifications of the schema" in said or "/checks.yaml" in said, said
            assert "nil" not in said
            assert "error calling" not in said
        else:
            for document in chart.documents(manifest):
                if document["apiVersion"] != "monitoring.coreos.com/v1":
                    kubernetes_validate.validate(document, "1.35", strict=True)


def test_by_the_template_of_the_older_helm() -> None:
    assert ": model.source is claim, and there is none: name one" in refusal("helm3", "model.source=claim")


@pytest.mark.parametrize("helm", chart.HELMS)
def test_a_cluster_that_is_too_old(helm: str) -> None:
    assert ">=1.30.0-0" in refusal(helm, version="1.29")
