"""What schemas cannot tell: that the chart's objects mean each other, and that processes take what they are told."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from app.cli.environment import refuse_unknown
from app.cli.meanings import Process, settings_of, sim_settings
from app.processes import supervision
from app.settings import GatewaySettings
from gms.settings import GmsSettings
from tests.support import chart
from tests.support.chart import container, containers, environment, in_bytes, kind, of, pods
from workers.settings import EngineSettings, PodSettings

CLASSES: dict[str, type[BaseSettings]] = {"gateway": GatewaySettings, "engine": EngineSettings, "gms": GmsSettings}
"""By the argument that the container is started with."""
ADDED = ("sim",)
"""Cases with variables in worker.extraEnv."""

each_case = pytest.mark.parametrize("case", chart.cases())


def labels_of(objects: list[chart.Document]) -> list[dict[str, str]]:
    return [pod["metadata"]["labels"] for _, pod in pods(objects)]


@each_case
def test_selectors_find_one_kind_of_pod(case: str) -> None:
    objects = of(case)
    selectors = []
    for it in objects:
        match it["kind"]:
            case "Deployment" | "StatefulSet":
                selector = it["spec"]["selector"]["matchLabels"]
                assert chart.selects(selector, it["spec"]["template"]["metadata"]["labels"])
                for spread in it["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
                    assert spread["labelSelector"]["matchLabels"] == selector
            case "Service":
                selector = it["spec"]["selector"]
            case "PodDisruptionBudget" | "PodMonitor":
                selector = it["spec"]["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = it["spec"]["podSelector"]["matchLabels"]
            case _:
                continue
        selectors.append(selector)
        assert sum(chart.selects(selector, labels) for labels in labels_of(objects)) == 1
    assert len(selectors) >= 4
    for monitor in (it for it in objects if it["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [it for it in objects if it["kind"] == "Service"]
        (service,) = [it for it in services if chart.selects(wanted, it["metadata"]["labels"])]
        assert {port["name"] for port in service["spec"]["ports"]} == {
            it["port"] for it in monitor["spec"]["endpoints"]
        }


@each_case
def test_ports_are_there_by_their_names(case: str) -> None:
    objects = of(case)
    for owner, pod in pods(objects):
        ports = [port for it in containers(pod) for port in it.get("ports", [])]
        names = [port["name"] for port in ports]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 15 for name in names)
        assert len({port["containerPort"] for port in ports}) == len(ports)
        for it in containers(pod):
            own = {port["name"] for port in it.get("ports", [])}
            probes = [it[name]["httpGet"]["port"] for name in it if name.endswith("Probe")]
            assert set(probes) <= own
            assert probes or owner.startswith("Pod ")
        labels = pod["metadata"]["labels"]
        for other in objects:
            spec = other.get("spec", {})
            match other["kind"]:
                case "Service" if chart.selects(spec["selector"], labels):
                    assert {port["targetPort"] for port in spec["ports"]} <= set(names)
                case "PodMonitor" if chart.selects(spec["selector"]["matchLabels"], labels):
                    assert {it["port"] for it in spec["podMetricsEndpoints"]} == set(names) - {"serving"}
                case "NetworkPolicy" if chart.selects(spec["podSelector"]["matchLabels"], labels):
                    numbers = {port["containerPort"] for port in ports}
                    assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= numbers


@each_case
def test_volumes_are_there_and_used(case: str) -> None:
    for _, pod in pods(of(case)):
        names = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        mounts = [mount for it in containers(pod) for mount in it.get("volumeMounts", [])]
        assert len(set(names)) == len(names)
        assert {mount["name"] for mount in mounts} == set(names)
        for it in containers(pod):
            paths = [mount["mountPath"] for mount in it.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)


@each_case
def test_accounts_roles_and_targets_are_there(case: str) -> None:
    objects = of(case)
    accounts = {it["metadata"]["name"]: it for it in objects if it["kind"] == "ServiceAccount"}
    bound = set()
    for it in objects:
        match it["kind"]:
            case "Deployment" | "StatefulSet":
                spec = it["spec"]["template"]["spec"]
                account = accounts[spec["serviceAccountName"]]
                assert account["automountServiceAccountToken"] == spec["automountServiceAccountToken"]
                if spec["automountServiceAccountToken"]:
                    bound.add(spec["serviceAccountName"])
                scaled = [
                    other["spec"]["scaleTargetRef"] for other in objects if other["kind"] == "HorizontalPodAutoscaler"
                ]
                me = {"apiVersion": it["apiVersion"], "kind": it["kind"], "name": it["metadata"]["name"]}
                assert ("replicas" in it["spec"]) != (me in scaled)
            case "StatefulSet":
                assert it["spec"]["serviceName"] == kind(objects, "Service", "-worker")["metadata"]["name"]
    bindings = [it for it in objects if it["kind"] == "RoleBinding"]
    assert {subject["name"] for it in bindings for subject in it["subjects"]} == bound
    for it in bindings:
        role = kind(objects, "Role")
        assert it["roleRef"]["name"] == role["metadata"]["name"]
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
    assert bool(bound) == (case == "scaled")


@each_case
def test_nobody_has_more_rights_than_needed(case: str) -> None:
    for _, pod in pods(of(case)):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for it in containers(pod):
            assert it["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(it["resources"])


def started(case: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Argument and environment of each container that runs one of our processes."""
    for _, pod in pods(of(case)):
        for it in containers(pod):
            if "command" not in it:
                (argument,) = it["args"]
                yield argument, environment(it)


@each_case
def test_every_variable_is_a_setting_of_its_process(case: str) -> None:
    for argument, variables in started(case):
        refuse_unknown(variables)
        # What a person adds to a pod is for engines and memory services alike.
        processes = [Process(argument)] if argument == "gateway" else [Process.ENGINE, Process.GMS]
        known = set().union(*map(known_to, processes)) if case in ADDED else known_to(Process(argument))
        assert {name for name in variables if name.startswith("HOTSPARE_")} <= known


@functools.cache
def known_to(process: Process) -> set[str]:
    settings = list(settings_of(process).values())
    if process is Process.ENGINE:
        settings += sim_settings().values()
    return {name for setting in settings for name in setting.variables}


@pytest.mark.parametrize("case", [case for case in chart.cases() if not case.startswith("gpu")])
def test_every_process_takes_its_settings(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would at its start: what does not fit raises."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # as in every pod
    for argument, variables in started(case):
        for name in [name for name in os.environ if name.startswith("HOTSPARE_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, "hotspare-worker-0" if value == "fieldRef" else value)
        settings = CLASSES[argument]()
        assert set(settings.model_fields_set) >= {"run_dir", "log_format", "log_level"}


@each_case
def test_engines_and_memory_services_find_each_other(case: str) -> None:
    (pod,) = [pod for owner, pod in pods(of(case)) if owner.startswith("StatefulSet")]
    services, engines = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert all(it["restartPolicy"] == "Always" for it in services)
    told = [environment(it) for it in engines]
    ports = [variables["HOTSPARE_ADMIN_PORT"] for variables in told]
    for number, (it, variables) in enumerate(zip(engines, told, strict=True)):
        assert it["name"] == f"engine-{variables['HOTSPARE_ENGINE_ID']}"
        others = variables.get("HOTSPARE_STANDBY_ADMIN_PORTS", "")
        assert [port for port in others.split(",") if port] == ports[:number] + ports[number + 1 :]
        declared = {port["name"]: str(port["containerPort"]) for port in it["ports"]}
        assert declared[f"admin-{variables['HOTSPARE_ENGINE_ID']}"] == variables["HOTSPARE_ADMIN_PORT"]
        assert declared.get("serving", variables["HOTSPARE_SERVING_PORT"]) == variables["HOTSPARE_SERVING_PORT"]
    kind_of_device, _, first = told[0]["HOTSPARE_DEVICE"].partition(":")
    devices = [f"{kind_of_device}:{rank}" for rank in range(int(told[0]["HOTSPARE_TENSOR_PARALLEL_SIZE"]))]
    assert first == "0"
    assert [environment(it)["HOTSPARE_GMS_DEVICE"] for it in services] == devices
    for it in services:
        (port,) = it["ports"]
        assert environment(it)["HOTSPARE_GMS_METRICS_PORT"] == str(port["containerPort"])
    same = ("HOTSPARE_RUN_DIR", "HOTSPARE_POD")
    assert len({tuple(environment(it)[name] for name in same) for it in containers(pod)}) == 1
    run = {"name": "run", "mountPath": environment(engines[0])["HOTSPARE_RUN_DIR"]}
    assert all(run in it["volumeMounts"] for it in containers(pod))


@each_case
def test_the_gateway_finds_the_workers(case: str) -> None:
    objects = of(case)
    service = kind(objects, "Service", "-worker")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (gateway,) = [variables for argument, variables in started(case) if argument == "gateway"]
    sources = {name: gateway[name] for name in gateway if name.startswith("HOTSPARE_WORKERS")}
    assert list(sources.values()) == [
        f"{namespace}/{name}:{port['port']}" if case == "scaled" else f"{name}.{namespace}.svc:{port['port']}"
    ]
    (engine, *_) = [variables for argument, variables in started(case) if argument == "engine"]
    assert engine["HOTSPARE_SERVING_PORT"] == str(port["port"])
    token = "HOTSPARE_WORKER_TOKEN_FILE"
    assert gateway.get(token) == engine.get(token)
    assert (token in gateway) == (case == "secured")


@each_case
def test_grace_periods_are_long_enough(case: str) -> None:
    for _, pod in pods(of(case)):
        it = pod["spec"]["containers"][0]
        if "command" in it:
            continue
        variables, grace = environment(it), pod["spec"]["terminationGracePeriodSeconds"]
        if it["args"] == ["gateway"]:
            sleep = it.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert sleep + int(variables["HOTSPARE_DRAIN_TIMEOUT_SECONDS"]) + 5 <= grace
            assert ("lifecycle" in it) == bool(sleep)
        else:
            shutdown = int(variables["HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS"])
            assert int(variables["HOTSPARE_GRACE_PERIOD_SECONDS"]) <= shutdown
            assert shutdown + int(variables["HOTSPARE_ENGINE_SHUTDOWN_SECONDS"]) + 10 <= grace
            assert all(probe["terminationGracePeriodSeconds"] == 1 for it in containers(pod) for probe in killing(it))


def killing(it: chart.Document) -> list[chart.Document]:
    return [it["livenessProbe"], it["startupProbe"]]


def test_a_new_chart_alone_replaces_no_pod() -> None:
    for owner, pod in pods(of("default")):
        if not owner.startswith("Pod "):
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod["metadata"]["labels"])


def test_liveness_is_the_supervisors() -> None:
    """What `hotspare pod` does on one machine the kubelet does here, as quickly."""
    (pod,) = [pod for owner, pod in pods(of("default")) if owner.startswith("StatefulSet")]
    fields = PodSettings.model_fields
    for it in pod["spec"]["containers"]:
        probe = it["livenessProbe"]
        assert probe["periodSeconds"] == fields["liveness_period_seconds"].default
        assert probe["timeoutSeconds"] == fields["liveness_timeout_seconds"].default
        assert probe["failureThreshold"] == fields["liveness_failures"].default
        startup = it["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == fields["startup_timeout_seconds"].default


def test_a_process_of_the_gateways_may_take_as_long_to_start_as_the_gateway() -> None:
    (pod,) = [pod for owner, pod in pods(of("default")) if owner.startswith("Deployment")]
    startup = container(pod, "gateway")["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] <= supervision.START_SECONDS


@pytest.mark.parametrize("case", ["default", "ranks", "sim", "shadows-7"])
def test_memory_is_split_as_it_is_charged(case: str) -> None:
    """Weights and KV cache are the memory service's, which populates them: its limit has room for both, and itself."""
    (pod,) = [pod for owner, pod in pods(of(case)) if owner.startswith("StatefulSet")]
    kv = int(environment(container(pod, "engine-a"))["HOTSPARE_KV_CACHE_BYTES"])
    for it in pod["spec"]["initContainers"]:
        pages = int(environment(it)["HOTSPARE_GMS_MEMORY_LIMIT"])
        memory = {it["resources"][part]["memory"] for part in ("requests", "limits")}
        assert len(memory) == 1  # pages are never given back, so what may be used is what is needed
        assert pages > kv
        assert in_bytes(memory.pop()) - pages >= 128 << 20


def test_a_gpu_is_one_claim_of_all_containers() -> None:
    objects = of("gpu-ranks")
    (pod,) = [pod for owner, pod in pods(objects) if owner.startswith("StatefulSet")]
    template = kind(objects, "ResourceClaimTemplate")
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    labels = template["spec"]["metadata"]["labels"]
    assert labels == kind(objects, "StatefulSet")["spec"]["selector"]["matchLabels"], (
        "no version: the spec is immutable"
    )
    assert [it["resources"]["claims"] for it in containers(pod)] == [[{"name": claim["name"]}]] * 6
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 4}
    assert all("HOTSPARE_GMS_MEMORY_LIMIT" not in environment(it) for it in pod["spec"]["initContainers"])


def devices(*settings: str, folder: Path = chart.CHART) -> chart.Document:
    """The ResourceClaimTemplate with these settings beside those of the case gpu-ranks."""
    more = [word for setting in settings for word in ("--set", setting)]
    values = str(chart.CASES / "gpu-ranks.yaml")
    objects = chart.documents(chart.template("helm", "1.34", "--values", values, *more, folder=folder))
    template = kind(objects, "ResourceClaimTemplate")
    (claim,) = kind(objects, "StatefulSet")["spec"]["template"]["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    return template


def test_a_new_chart_alone_leaves_the_claim_as_it_is(tmp_path: Path) -> None:
    """Kubernetes refuses any change of a ResourceClaimTemplate's spec."""
    newer = shutil.copytree(chart.CHART, tmp_path / "hotspare")
    meta = newer / "Chart.yaml"
    meta.write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.8.7", meta.read_text()))
    before, after = devices(), devices("image.worker.tag=new", "commonLabels.team=a", folder=newer)
    assert after["metadata"]["labels"]["app.kubernetes.io/version"] == "9.8.7"
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert before["spec"] == after["spec"]


@pytest.mark.parametrize("setting", ["gpu.selectors={a==b}", "gpu.deviceClassName=a", "worker.tensorParallelSize=2"])
def test_another_claim_is_another_object(setting: str) -> None:
    before, after = devices(), devices(setting)
    assert before["spec"] != after["spec"]
    assert before["metadata"]["name"] != after["metadata"]["name"]


def test_a_pod_that_is_not_ready_is_evicted_where_it_serves_nobody() -> None:
    """A worker may serve while its spare starts, and is not Ready then."""
    policies = {
        component: kind(of("default"), "PodDisruptionBudget", component)["spec"]["unhealthyPodEvictionPolicy"]
        for component in ("gateway", "worker")
    }
    assert policies == {"gateway": "AlwaysAllow", "worker": "IfHealthyBudget"}


def test_with_tls_all_of_the_gateway_is_https() -> None:
    objects = of("secured")
    (pod,) = [pod for owner, pod in pods(objects) if owner.startswith("Deployment")]
    probes = [it for name, it in pod["spec"]["containers"][0].items() if name.endswith("Probe")]
    assert {it["httpGet"]["scheme"] for it in probes} == {"HTTPS"}
    (port,) = kind(objects, "Service", "-gateway")["spec"]["ports"]
    assert (port["name"], port["port"], port["nodePort"]) == ("https", 443, 30443)
    (endpoint,) = kind(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"]["credentials"] == {"name": "chat-keys", "key": "one"}
    assert environment(kind(objects, "Pod")["spec"]["containers"][0])["URL"] == "https://chat-gateway.llm.svc:443"


def asked(*settings: str, case: str = "secured") -> tuple[chart.Document, dict[str, str], list[chart.Document]]:
    """How Prometheus verifies the gateway, and what `helm test` is told and has for that."""
    more = [word for setting in settings for word in ("--set", setting)]
    objects = chart.documents(chart.template("helm", "1.34", "--values", str(chart.CASES / f"{case}.yaml"), *more))
    (endpoint,) = kind(objects, "ServiceMonitor")["spec"]["endpoints"]
    spec = kind(objects, "Pod")["spec"]
    return endpoint["tlsConfig"], environment(spec["containers"][0]), spec.get("volumes", [])


def test_a_key_is_shown_to_whom_a_named_ca_vouches_for() -> None:
    verified, told, (volume,) = asked()
    assert verified == {
        "serverName": "chat-gateway.llm.svc",
        "ca": {"secret": {"name": "chat-tls", "key": "ca.crt"}},
    }
    assert (told["SERVER_NAME"], told["CA"]) == ("chat-gateway.llm.svc", "/etc/hotspare/ca/ca.crt")
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]

    verified, told, (volume,) = asked(case="verified")
    assert verified == {
        "serverName": "chat.example.com",
        "ca": {"configMap": {"name": "chat-ca", "key": "root.pem"}},
    }
    assert (told["SERVER_NAME"], told["CA"]) == ("chat.example.com", "/etc/hotspare/ca/ca.crt")
    assert volume["configMap"] == {"name": "chat-ca", "items": [{"key": "root.pem", "path": "ca.crt"}]}


def test_without_a_named_ca_a_key_is_shown_to_whom_every_ca_vouches_for() -> None:
    verified, told, volumes = asked("tls.ca.existingSecret=")
    assert verified == {"serverName": "chat-gateway.llm.svc"}
    assert told["SERVER_NAME"] == "chat-gateway.llm.svc"
    assert "CA" not in told
    assert volumes == []


def test_nobody_verifies_only_where_that_is_said() -> None:
    verified, told, _ = asked("monitoring.serviceMonitor.tlsConfig.insecureSkipVerify=true")
    assert verified == {"insecureSkipVerify": True}
    assert told["CA"]


def test_secrets_are_mounted_where_processes_look() -> None:
    for _, pod in pods(of("secured")):
        for it in containers(pod):
            files = {name: path for name, path in environment(it).items() if path.startswith("/etc/hotspare/")}
            mounts = {mount["mountPath"]: mount for mount in it.get("volumeMounts", [])}
            for path in files.values():
                folder, _, name = path.rpartition("/")
                assert mounts[folder]["readOnly"] is True
                (volume,) = [v["secret"] for v in pod["spec"]["volumes"] if v["name"] == mounts[folder]["name"]]
                assert volume["defaultMode"] == 0o440
                assert name in [item["path"] for item in volume.get("items", [])] or name.startswith("tls.")


def test_workers_are_closed_to_strangers() -> None:
    closed = kind(of("default"), "NetworkPolicy", "-worker")["spec"]
    (rule,) = closed["ingress"]
    assert closed["policyTypes"] == ["Ingress"]
    assert rule["ports"] == [{"port": 8100, "protocol": "TCP"}], "numbers: not every network knows sidecars' names"
    (gateways,) = rule["from"]
    assert gateways["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    opened = kind(of("secured"), "NetworkPolicy", "-worker")["spec"]["ingress"]
    assert [port["port"] for port in opened[1]["ports"]] == [8101, 8102, 8109]
    (front,) = kind(of("secured"), "NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert [next(iter(peer)) for peer in front["from"]] == ["namespaceSelector", "namespaceSelector", "podSelector"]
    assert "from" not in kind(of("default"), "NetworkPolicy", "-gateway")["spec"]["ingress"][0]
    assert not [it for it in of("scaled-otherwise") if it["kind"] == "NetworkPolicy"]


def rules(case: str) -> list[chart.Document]:
    (group,) = kind(of(case), "PrometheusRule")["spec"]["groups"]
    return group["rules"]


@pytest.mark.parametrize("case", ["secured", "ranks", "shadows-0"])
def test_alerts_are_about_metrics_that_there_are(case: str) -> None:
    documented = set(re.findall(r"`((?:hotspare|process)_\w+)`", (chart.ROOT / "docs" / "metrics.md").read_text()))
    jobs = set()
    for it in rules(case):
        used = re.findall(r"\b(?:hotspare|process)_\w+", re.sub(r'"[^"]*"', '""', it["expr"]))
        assert used
        for name in used:
            assert name in documented or name.removesuffix("_bucket") in documented
        jobs |= set(re.findall(r'job="([^"]+)"', it["expr"]))
        assert it["expr"].count("{") == it["expr"].count('namespace="llm"') == len(used)
        assert it["labels"]["severity"] in ("warning", "critical")
    assert ("HotspareNoSpare" in {it["alert"] for it in rules(case)}) == (case != "shadows-0")
    if case == "secured":
        monitors = [it["spec"] for it in of(case) if it["kind"] in ("ServiceMonitor", "PodMonitor")]
        endpoints = [it for spec in monitors for it in spec.get("endpoints", spec.get("podMetricsEndpoints"))]
        assert {relabel["replacement"] for it in endpoints for relabel in it["relabelings"]} == jobs


def test_every_alert_of_the_manual_is_there() -> None:
    """The table in docs/operations.md names metrics; each of them is in a rule."""
    section = (chart.ROOT / "docs" / "operations.md").read_text().partition("### Alerts")[2].partition("###")[0]
    wanted = set(re.findall(r"\b(?:hotspare|process)_\w+", section))
    assert wanted <= set(re.findall(r"\b(?:hotspare|process)_\w+", " ".join(it["expr"] for it in rules("secured"))))
