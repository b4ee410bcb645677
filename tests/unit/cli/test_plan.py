"""What ``up`` will start, worked out without starting anything."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from app.cli.plan import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_ENGINE_SHUTDOWN_SECONDS,
    DEFAULT_KILL_MARGIN_SECONDS,
    DEFAULT_SHUTDOWN_SECONDS,
    DEFAULT_STARTUP_SECONDS,
    MAX_SHADOWS,
    UpOptions,
    base_url,
    child_environment,
    example_request,
    fixed_pod,
    free_pod,
    gateway_arguments,
    last_port,
    limits_from,
    pod_arguments,
    pod_environment,
    ports_needed,
    ranks_from,
)
from app.settings import GatewaySettings
from workers.settings import KILL_MARGIN_SECONDS, PodSettings


def test_ports_are_those_of_the_contracts() -> None:
    options = UpOptions(pods=3)
    pod = fixed_pod(options, 2)
    assert (pod.name, pod.serving, pod.admin, pod.gms_metrics) == ("pod-2", 8120, (8121, 8122), 8129)
    assert last_port(options) == 8129
    assert fixed_pod(UpOptions(shadows=0), 0).admin == (8101,)
    assert PodSettings.model_fields["shadows"].metadata[1].le == MAX_SHADOWS
    most = fixed_pod(UpOptions(shadows=MAX_SHADOWS), 1)
    assert sorted(most.ports()) == list(range(8110, 8120))
    assert PodSettings(shadows=MAX_SHADOWS).admin_ports == fixed_pod(UpOptions(shadows=MAX_SHADOWS), 0).admin


def test_memory_services_of_further_ranks_have_ports_behind_those_of_all_pods() -> None:
    options = UpOptions(pods=2, tensor_parallel_size=ranks_from({"HOTSPARE_TENSOR_PARALLEL_SIZE": "3"}))
    pods = [fixed_pod(options, index) for index in range(2)]
    assert [pod.more_gms_metrics for pod in pods] == [(8120, 8121), (8122, 8123)]
    assert last_port(options) == 8123
    assert pods[1].ports()[8123] == "memory service's metrics of rank 2"
    arguments = pod_arguments(options, pods[1])
    assert arguments[arguments.index("--more-gms-metrics-ports") + 1] == "8122,8123"
    free = free_pod(options, 0, ports := list(range(41, 41 + ports_needed(options))))
    assert (sorted(free.ports()), len(free.admin), len(free.more_gms_metrics)) == (ports, 2, 2)


@pytest.mark.parametrize(("given", "ranks"), [("", 1), ("2", 2), ("8", 8), ("9", 1), ("0", 1), ("two", 1)])
def test_ranks_are_the_pods_to_refuse(given: str, ranks: int) -> None:
    assert ranks_from({"HOTSPARE_TENSOR_PARALLEL_SIZE": given}) == ranks


def test_any_free_ports() -> None:
    options = UpOptions(base_port=0)
    ports = [41, 42, 43, 44]
    assert len(ports) == ports_needed(options)
    pod = free_pod(options, 0, ports)
    assert sorted(pod.ports()) == ports
    assert len(pod.admin) == 2


def test_command_lines() -> None:
    options = UpOptions(pods=2, engine="sim", run_dir=Path("/r"), host="0.0.0.0", keeper=False)
    pods = [fixed_pod(options, index) for index in range(2)]
    assert gateway_arguments(options, 8000, pods) == [
        *("--port", "8000", "--host", "0.0.0.0"),
        *("--workers", "127.0.0.1:8100,127.0.0.1:8110"),
    ]
    assert pod_arguments(options, pods[1]) == [
        *("--pod", "pod-1", "--run-dir", "/r", "--host", "127.0.0.1", "--engine", "sim"),
        *("--serving-port", "8110", "--admin-ports", "8111,8112", "--gms-metrics-port", "8119"),
        *("--shadows", "1", "--gms", "--no-keeper"),
    ]


def test_children_inherit_everything_but_what_tells_them_apart() -> None:
    environment = {"PATH": "/bin", "HOTSPARE_SIM_SEED": "1", "HOTSPARE_INSTANCE": "x", "hotspare_pod": "y"}
    child = child_environment(environment, run_dir=Path("/r"), parent_pid=7, model=Path("/m"), worker_token="t")
    assert child == {
        "PATH": "/bin",
        "HOTSPARE_SIM_SEED": "1",
        "HOTSPARE_RUN_DIR": "/r",
        "HOTSPARE_PARENT_PID": "7",
        "HOTSPARE_MODEL": "/m",
        "HOTSPARE_WORKER_TOKEN": "t",
    }


@pytest.mark.parametrize("name", ["HOTSPARE_WORKER_TOKEN", "hotspare_worker_token", "HOTSPARE_WORKER_TOKEN_FILE"])
def test_a_worker_token_of_the_environment_is_kept(name: str) -> None:
    child = child_environment({name: "theirs"}, run_dir=Path("/r"), parent_pid=7, model=None, worker_token="made")
    assert child[name] == "theirs"
    assert "made" not in child.values()


def test_pods_do_not_get_what_is_the_gateways() -> None:
    given = {"HOTSPARE_API_KEYS": "k", "hotspare_api_key": "k", "HOTSPARE_WORKER_TOKEN": "t", "PATH": "/bin"}
    assert pod_environment(given) == {"HOTSPARE_WORKER_TOKEN": "t", "PATH": "/bin"}


def test_limits_follow_the_processes_own() -> None:
    assert (limits_from({}).gateway, limits_from({}).pod) == (15.0, 950.0)
    given = limits_from({"HOTSPARE_DRAIN_TIMEOUT_SECONDS": "60", "HOTSPARE_KILL_AFTER_SECONDS": "90"})
    assert (given.gateway, given.pod, given.drain) == (70.0, 100.0, 60.0)
    assert limits_from({"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30"}).gateway == 40.0
    assert limits_from({"HOTSPARE_KILL_AFTER_SECONDS": "soon"}).pod == 950.0
    shorter = {"HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "20", "HOTSPARE_ENGINE_SHUTDOWN_SECONDS": "2"}
    assert limits_from(shorter).pod == 42.0
    assert limits_from({"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "60"}).pod == 110.0


def test_without_variables_the_limits_are_those_of_the_settings() -> None:
    fields, gateway = PodSettings.model_fields, GatewaySettings.model_fields
    assert fields["shutdown_timeout_seconds"].default == DEFAULT_SHUTDOWN_SECONDS
    assert fields["engine_shutdown_seconds"].default == DEFAULT_ENGINE_SHUTDOWN_SECONDS
    assert KILL_MARGIN_SECONDS == DEFAULT_KILL_MARGIN_SECONDS
    assert fields["startup_timeout_seconds"].default == DEFAULT_STARTUP_SECONDS == limits_from({}).start
    assert gateway["drain_timeout_seconds"].default == DEFAULT_DRAIN_SECONDS


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_base_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


def test_the_example_survives_a_shell() -> None:
    words = shlex.split(example_request("http://h:1", 'it\'s "mine"'))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["max_tokens"]) == ('it\'s "mine"', 64)


def test_the_example_with_a_key_and_a_certificate() -> None:
    assert base_url("0.0.0.0", 8000, tls=True) == "https://127.0.0.1:8000"
    prompt = shlex.split(example_request("http://h:1", "m", chats=False))
    assert "http://h:1/v1/completions" in prompt
    assert json.loads(prompt[-1])["prompt"]
    example = example_request("https://h:1", "m", key="$HOTSPARE_API_KEY", certificate="/my certs/tls.crt")
    assert '-H "authorization: Bearer $HOTSPARE_API_KEY"' in example  # the shell puts it in
    assert shlex.split(example)[:5] == [
        "curl",
        "-N",
        "--cacert",
        "/my certs/tls.crt",
        "https://h:1/v1/chat/completions",
    ]
