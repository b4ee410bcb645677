"""[P] What ``hotspare up`` will start: ports, command lines, and how long each may take to stop."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.hosts import authority, reachable

LOOPBACK: Final = "127.0.0.1"
"""Where pods listen: only the gateway is for others."""
PORTS_PER_POD: Final = 10
GMS_METRICS_OFFSET: Final = 9
MAX_PORT: Final = 65535
MAX_RANKS: Final = 8
"""That of WorkerSettings."""
DEFAULT_DRAIN_SECONDS: Final = 5.0
DEFAULT_SHUTDOWN_SECONDS: Final = 900.0
DEFAULT_ENGINE_SHUTDOWN_SECONDS: Final = 30.0
DEFAULT_KILL_MARGIN_SECONDS: Final = 10.0
DEFAULT_STARTUP_SECONDS: Final = 600.0
"""Those of GatewaySettings and PodSettings."""
STOP_MARGIN_SECONDS: Final = 10.0
EXAMPLE_TOKENS: Final = 64
"""So that the first request somebody tries comes to an end soon, whatever the model."""
CHATTING: Final = frozenset({"vllm", "sim", "sglang", "trtllm"})
"""Engines that are known to have the route for chats."""
ENGINE_IDS: Final = "abcdefgh"
MAX_SHADOWS: Final = len(ENGINE_IDS) - 1
"""That of PodSettings; their ports, and the memory service's, are all that a pod has."""

WORKER_TOKEN: Final = "HOTSPARE_WORKER_TOKEN"  # noqa: S105 - a name
GATEWAYS_OWN: Final = frozenset({"HOTSPARE_API_KEY", "HOTSPARE_API_KEYS"})
"""Secrets that pods have no use for."""

PER_PROCESS: Final = frozenset(
    {
        "HOTSPARE_POD",
        "HOTSPARE_INSTANCE",
        "HOTSPARE_ENGINE_ID",
        "HOTSPARE_ADMIN_PORT",
        "HOTSPARE_ADMIN_PORTS",
        "HOTSPARE_STANDBY_ADMIN_PORTS",
        "HOTSPARE_SERVING_PORT",
        "HOTSPARE_WORKERS",
        "HOTSPARE_WORKERS_FILE",
        "HOTSPARE_WORKERS_DNS",
        "HOTSPARE_WORKERS_KUBERNETES",
        "HOTSPARE_GMS_SOCKET",
        "HOTSPARE_GMS_METRICS_PORT",
        "HOTSPARE_MORE_GMS_METRICS_PORTS",
    }
)
"""What ``up`` gives to each process on its own; from the outside it would make two pods claim to be one."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What the person at the terminal asked for. A port of 0 means any free one."""

    pods: int = 1
    engine: str = "vllm"
    model: Path | None = None
    host: str = LOOPBACK
    port: int = 8000
    base_port: int = 8100
    run_dir: Path = Path(".hotspare")
    shadows: int = 1
    gms: bool = True
    keeper: bool = True
    tensor_parallel_size: int = 1
    """Ranks of each engine. The variable alone says it: there is no option."""


@dataclass(frozen=True, kw_only=True)
class PodPlan:
    """One pod: its name and its ports."""

    name: str
    serving: int
    admin: tuple[int, ...]
    gms_metrics: int
    more_gms_metrics: tuple[int, ...] = ()
    """Of further ranks' memory services."""

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.serving}"

    def ports(self) -> dict[int, str]:
        """Port → what it is for, for messages."""
        engines = {port: f"engine {ENGINE_IDS[at]}" for at, port in enumerate(self.admin)}
        more = {port: f"memory service's metrics of rank {at}" for at, port in enumerate(self.more_gms_metrics, 1)}
        return {self.serving: "serving port", **engines, self.gms_metrics: "memory service's metrics", **more}


def last_port(options: UpOptions) -> int:
    """The highest port that a fixed ``base_port`` leads to."""
    more = options.pods * (options.tensor_parallel_size - 1)
    return options.base_port + PORTS_PER_POD * (options.pods - 1) + GMS_METRICS_OFFSET + more


def ranks_from(environment: Mapping[str, str]) -> int:
    """How many ranks an engine has, as the pods read it; a bad value is theirs to refuse."""
    given = environment.get("HOTSPARE_TENSOR_PARALLEL_SIZE", "")
    return int(given) if given.isdecimal() and 1 <= int(given) <= MAX_RANKS else 1


def pod_name(index: int) -> str:
    return f"pod-{index}"


def fixed_pod(options: UpOptions, index: int) -> PodPlan:
    """Pod ``index`` with the ports that the documentation promises."""
    base = options.base_port + PORTS_PER_POD * index
    more = options.base_port + PORTS_PER_POD * options.pods + (options.tensor_parallel_size - 1) * index
    return PodPlan(
        name=pod_name(index),
        serving=base,
        admin=tuple(base + 1 + engine for engine in range(options.shadows + 1)),
        gms_metrics=base + GMS_METRICS_OFFSET,
        more_gms_metrics=tuple(range(more, more + options.tensor_parallel_size - 1)),
    )


def ports_needed(options: UpOptions) -> int:
    """How many ports a pod needs when any will do."""
    return options.shadows + options.tensor_parallel_size + 2


def free_pod(options: UpOptions, index: int, ports: Sequence[int]) -> PodPlan:
    """Pod ``index`` on ``ports_needed`` ports that somebody reserved."""
    serving, metrics, *others = ports
    more, admin = tuple(others[: options.tensor_parallel_size - 1]), tuple(others[options.tensor_parallel_size - 1 :])
    return PodPlan(name=pod_name(index), serving=serving, admin=admin, gms_metrics=metrics, more_gms_metrics=more)


def gateway_arguments(options: UpOptions, port: int, pods: Sequence[PodPlan]) -> list[str]:
    workers = ",".join(pod.address for pod in pods)
    return ["--port", str(port), "--host", options.host, "--workers", workers]


def pod_arguments(options: UpOptions, pod: PodPlan) -> list[str]:
    return [
        *("--pod", pod.name),
        *("--run-dir", str(options.run_dir)),
        *("--host", LOOPBACK),
        *("--engine", options.engine),
        *("--serving-port", str(pod.serving)),
        *("--admin-ports", ",".join(map(str, pod.admin))),
        *("--gms-metrics-port", str(pod.gms_metrics)),
        *(("--more-gms-metrics-ports", ",".join(map(str, pod.more_gms_metrics))) if pod.more_gms_metrics else ()),
        *("--shadows", str(options.shadows)),
        "--gms" if options.gms else "--no-gms",
        "--keeper" if options.keeper else "--no-keeper",
    ]


def child_environment(
    environment: Mapping[str, str], *, run_dir: Path, parent_pid: int, model: Path | None, worker_token: str
) -> dict[str, str]:
    """What children inherit: everything, but the names by which processes are told apart. ``worker_token`` is theirs
    unless the environment names another one."""
    child = {name: value for name, value in environment.items() if name.upper() not in PER_PROCESS}
    named = {name.upper() for name, value in environment.items() if value}
    if named.isdisjoint((WORKER_TOKEN, f"{WORKER_TOKEN}_FILE")):
        child[WORKER_TOKEN] = worker_token
    child["HOTSPARE_RUN_DIR"] = str(run_dir)
    child["HOTSPARE_PARENT_PID"] = str(parent_pid)
    if model is not None:
        child["HOTSPARE_MODEL"] = str(model)
    return child


def pod_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of it that is for pods."""
    return {name: value for name, value in environment.items() if name.upper() not in GATEWAYS_OWN}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that ``up`` waits for something."""

    gateway: float
    """For a gateway that was asked to stop, before it is killed: its own limit, and a margin."""
    pod: float
    """The same for a pod."""
    drain: float = DEFAULT_DRAIN_SECONDS
    """For the requests that a gateway has when it is asked to stop; its own limit."""
    start: float
    """For the next step of a start, before it is given up."""


def limits_from(environment: Mapping[str, str]) -> Limits:
    """From the same variables that gateway and pod read; a bad value is theirs to refuse."""
    other = _seconds(environment, "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", DEFAULT_DRAIN_SECONDS)
    drain = _seconds(environment, "HOTSPARE_DRAIN_TIMEOUT_SECONDS", other)
    other = _seconds(environment, "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", DEFAULT_SHUTDOWN_SECONDS)
    orderly = _seconds(environment, "HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS", other)
    orderly += _seconds(environment, "HOTSPARE_ENGINE_SHUTDOWN_SECONDS", DEFAULT_ENGINE_SHUTDOWN_SECONDS)
    killed = _seconds(environment, "HOTSPARE_KILL_AFTER_SECONDS", orderly + DEFAULT_KILL_MARGIN_SECONDS)
    start = _seconds(environment, "HOTSPARE_STARTUP_TIMEOUT_SECONDS", DEFAULT_STARTUP_SECONDS)
    return Limits(gateway=drain + STOP_MARGIN_SECONDS, pod=killed + STOP_MARGIN_SECONDS, start=start, drain=drain)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environment[name])
    except (KeyError, ValueError):
        return default


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """Where a client on this machine finds the API."""
    return f"{'https' if tls else 'http'}://{authority(reachable(host), port)}"


def example_request(url: str, model: str, *, key: str = "", certificate: str | None = None, chats: bool = True) -> str:
    """A command that works as it stands in any POSIX shell; with keys, in one that has the same variables. ``key`` is
    what stands for one there: none is written out, since terminals are logged and shown. Without ``chats`` it is
    what every engine has to answer."""
    said = {"messages": [{"role": "user", "content": "Say hello."}]} if chats else {"prompt": "Say hello."}
    path = "chat/completions" if chats else "completions"
    body = json.dumps({"model": model, "stream": True, "max_tokens": EXAMPLE_TOKENS, **said})
    trust = f" --cacert {shlex.quote(certificate)}" if certificate else ""
    shown = f' -H "authorization: Bearer {key}"' if key else ""
    return f"curl -N{trust} {url}/v1/{path}{shown} -H 'content-type: application/json' -d {shlex.quote(body)}"
