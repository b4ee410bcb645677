"""Settings of the worker's processes: the only place in ``workers`` that reads the environment.

Every field can be set by an environment variable (``HOTSPARE_`` + the field's name) and by a command-line flag (the
field's name with dashes); flags win. Values that contradict each other refuse to start, with a sentence.
"""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from workers.contract import parse_worker_tokens
from workers.heartbeat import BEAT_PERIOD_SECONDS

MIB = 1024 * 1024

DEFAULT_RUN_DIR = Path(".hotspare")

EngineName = Literal["vllm", "sim"]
EngineId = Annotated[str, StringConstraints(pattern=r"^[a-z]$")]
PodName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]

SECRET = frozenset({"worker_token"})
"""Settings whose values are repeated nowhere, and which have no flag: whoever may list processes can read those."""

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

MIN_BEAT_TIMEOUT_SECONDS = 3 * BEAT_PERIOD_SECONDS
"""With less, one late beat of a busy machine would cost a healthy engine its life."""
MAX_UNIX_PATH_BYTES = 107
"""``sun_path`` holds 108 bytes with its terminating zero (unix(7))."""


def _split_ports(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _unset_if_empty(value: object) -> object:
    """An empty variable is as good as none: Compose's ``${NAME:-}`` sets those."""
    return None if value == "" else value


def _run_dir(value: object) -> object:
    return DEFAULT_RUN_DIR if value == "" else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _split_arguments(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


def _on_cpu(device: str) -> str:
    if not device.startswith("cpu:"):
        raise ValueError(
            "engines run on the CPU in this version and cannot use a GPU's memory; choose cpu:N "
            "(the memory service alone takes cuda:N: gms --device)"
        )
    return device


def _token(value: SecretStr) -> SecretStr:
    (token,) = parse_worker_tokens(value.get_secret_value().encode())
    return SecretStr(token)


OptionalPath = Annotated[Path | None, BeforeValidator(_unset_if_empty)]
Ports = Annotated[tuple[Port, ...], NoDecode, BeforeValidator(_split_ports)]
"""Comma-separated in a flag or an environment variable."""
Arguments = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_arguments)]
"""As a shell would split them."""


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
"""Upper or lower case: what people write for Python's logging is understood, too."""


class SettingsError(Exception):
    """The settings cannot be used; the message is a sentence for the person who made them."""


def load_settings(cls: type[SettingsT], flags: dict[str, Any]) -> SettingsT:
    """Settings from the environment, overridden by ``flags`` (field name → value).

    Raises:
        SettingsError: a value does not fit; names the variable, what is wrong and what was given.
    """
    try:
        return cls(**flags)
    except ValidationError as error:
        sentences = []
        for problem in error.errors(include_url=False):
            name = _variable(cls, error.title, problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            given = problem.get("input")
            secret = bool(problem["loc"]) and problem["loc"][0] in SECRET
            shown = "" if secret or isinstance(given, dict) else f" (given: {given!r})"
            where = f"{name}{shown}: " if name and (secret or shown) else ""
            sentences.append(f"{where}{message}")
        raise SettingsError("; ".join(sentences)) from error


def _variable(cls: type[BaseSettings], failed: str, location: tuple[int | str, ...]) -> str:
    """The variable behind a problem; "" if it is about several. ``failed`` is the class that refused: ``cls``, or
    settings nested in it, which have a prefix of their own."""
    nested = {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseSettings)
    }
    owner = next((other for other in nested.values() if other.__name__ == failed), cls)
    if location and location[0] in nested:
        owner, location = nested[str(location[0])], location[1:]
    return f"{owner.model_config.get('env_prefix', '')}{str(location[0]).upper()}" if location else ""


class SimSettings(BaseSettings):
    """The sim engine: what it pretends to be. Durations are seconds, sizes bytes."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_SIM_", extra="ignore")

    seed: int = 0
    """What it says follows from this and the prompt."""
    ttft_seconds: Annotated[float, Field(ge=0, le=600)] = 0.02
    """Time to the first token."""
    token_seconds: Annotated[float, Field(ge=0, le=60)] = 0.005
    """Time between two tokens."""
    startup_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """How long its initialisation takes."""
    weights_bytes: Annotated[int, Field(ge=4096, le=1 << 40)] = 8 * MIB
    """Size of its weights."""
    kv_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 16 * MIB
    """Size of its KV cache."""
    max_model_len: Annotated[int, Field(ge=16, le=1 << 22)] = 131072
    """Most tokens of a prompt and its answer together."""


class WorkerSettings(BaseSettings):
    """What every process of a pod must agree on."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_", extra="ignore", populate_by_name=True)

    engine: EngineName = "vllm"
    """``vllm``, or ``sim``: a deterministic engine without a model."""
    pod: PodName = "pod-0"
    """The pod's name, and that of its folder in the run folder."""
    instance: str = Field(default_factory=lambda: secrets.token_hex(8), min_length=1, max_length=64)
    """The pod's life: in Kubernetes the pod's UID, elsewhere made by the supervisor."""
    run_dir: Annotated[Path, BeforeValidator(_run_dir)] = DEFAULT_RUN_DIR
    """Folder of this machine's pods: sockets, locks, logs."""
    host: str = "127.0.0.1"
    """Address that the serving port and the admin ports listen on."""
    serving_port: Port = 8100
    """Where the pod's active engine serves; one engine at a time has it."""
    gms: bool = True
    """Whether weights and KV cache live in a memory service, which outlives the engines."""
    keeper: bool = True
    """Whether a warm parent forks the engine, and forks it anew when it dies."""
    worker_token: Annotated[SecretStr, AfterValidator(_token)] | None = None
    """Requests and watches on the serving port must show this token, or one of the file's; without either, whoever
    reaches the port is answered. Gateways have the same setting. It has no flag: those can be read by others."""
    worker_token_file: OptionalPath = None
    """Tokens, one a line, all of them accepted; ``#`` begins a comment. Read again within seconds when it changes."""
    device: Annotated[str, AfterValidator(_on_cpu), StringConstraints(pattern=r"^(cpu|cuda):[0-9]{1,3}$")] = "cpu:0"
    """Whose memory it is: ``cpu:N``. Engines of this version run on the CPU."""
    log_format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""
    log_level: LogLevel = "info"
    """Least level that is logged; upper or lower case."""
    parent_pid: int | None = None
    """Die when this process, the parent, dies. Set by whoever starts us on one machine; unset in a container."""
    drain_timeout_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long a terminating engine waits for the requests it has."""
    engine_shutdown_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """How long an engine may take to stop after its requests have ended; if it is silent for longer it is killed."""

    @property
    def pod_dir(self) -> Path:
        """The folder of this pod: lock, sockets, pod.json."""
        return self.run_dir / self.pod

    @property
    def lock_path(self) -> Path:
        return self.pod_dir / "active.lock"

    @property
    def gms_socket(self) -> Path:
        return self.pod_dir / f"gms-{self.device.replace(':', '-')}.sock"

    @model_validator(mode="after")
    def _paths_fit(self) -> Self:
        self.run_dir = Path(os.path.abspath(self.run_dir))
        if self.worker_token_file is not None:
            self.worker_token_file = Path(os.path.abspath(self.worker_token_file))
        longest = len(os.fsencode(self.pod_dir / "engine-a" / "zmq-output"))
        if longest > MAX_UNIX_PATH_BYTES:
            raise ValueError(
                f"the run folder's path is too long for Unix sockets: {self.pod_dir} leads to a socket path of "
                f"{longest} bytes and the system allows {MAX_UNIX_PATH_BYTES}; choose a shorter HOTSPARE_RUN_DIR"
            )
        return self


class EngineSettings(WorkerSettings):
    """One engine of a pod."""

    engine_id: EngineId = "a"
    """Which engine of the pod this one is: a letter."""
    admin_port: Port = 8101
    """Where this engine answers for its role, its health and its metrics."""
    standby_admin_ports: Ports = ()
    """Admin ports of the pod's other engines, asked for their role: the watch says whether a spare is there."""
    capacity: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most requests at a time; one more is refused, and its gateway looks elsewhere or lets it wait."""
    heartbeat_seconds: Annotated[float, Field(gt=0, le=60)] = 1.0
    """The watch says something at least this often."""
    beat_timeout_seconds: Annotated[float, Field(ge=MIN_BEAT_TIMEOUT_SECONDS, le=3600)] = 3.0
    """The keeper kills an engine whose event loop gave no beat for this long."""
    init_beat_timeout_seconds: Annotated[float, Field(ge=MIN_BEAT_TIMEOUT_SECONDS, le=3600)] = 60.0
    """``beat_timeout_seconds`` before the engine is initialised: loading weights may hold the loop up for a while."""
    step_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """The keeper kills an engine that took no step for this long while requests run."""
    bind_timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long a promoted engine tries to get the serving port."""
    memory_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long to wait for the memory service to do what another engine holds up: its commit of the weights."""
    memory_wait_seconds: Annotated[float, Field(ge=0, le=600)] = 15.0
    """How long to wait for room in the memory service: what a dead engine held is given back in a moment."""
    memory_connect_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long to wait for the memory service to answer: it may be starting, or starting again."""

    model: OptionalPath = None
    """Model folder (Hugging Face layout). Unset: the embedded SmolLM2-135M-Instruct."""
    served_model_name: str | None = None
    """The model's name in the API. Unset: the engine's choice."""
    dtype: str = "float32"
    """Type of weights and activations, as vLLM names it."""
    max_model_len: Annotated[int, Field(ge=16)] = 2048
    """Most tokens of a prompt and its answer together."""
    kv_cache_bytes: Annotated[int, Field(ge=MIB)] = 512 * MIB
    """Size of the KV cache."""
    engine_args: Arguments = ()
    """Further arguments for vLLM, as ``vllm serve`` takes them."""
    sim: SimSettings = Field(default_factory=SimSettings)


class PodSettings(WorkerSettings):
    """The supervisor of one pod on this machine."""

    shadows: Annotated[int, Field(ge=0, le=1)] = 1
    """Spare engines, 0 or 1."""
    admin_ports: Ports = (8101, 8102)
    """Admin ports of the engines, comma separated, one each."""
    gms_metrics_port: Annotated[int, Field(ge=0, le=65535)] = 8109
    """Where the memory service serves /metrics; 0: nowhere."""
    gms_memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """Most that the memory service may hold; 0: no limit but the machine's."""
    liveness_period_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How often each engine is asked whether it lives."""
    liveness_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How long its answer may take."""
    liveness_failures: Annotated[int, Field(ge=1, le=100)] = 5
    """So many failures in a row, and the engine is killed."""
    startup_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Liveness does not count before an engine's first answer, for at most this long."""
    grace_period_seconds: Annotated[float, Field(gt=0, le=86400)] = 15.0
    """SIGTERM to SIGKILL: time for the requests, for the engine's own shutdown, and some to spare."""

    @model_validator(mode="after")
    def _grace_covers_drain(self) -> Self:
        orderly = self.drain_timeout_seconds + self.engine_shutdown_seconds
        if self.grace_period_seconds <= orderly:
            raise ValueError(
                f"grace_period_seconds ({self.grace_period_seconds:g}) must be longer than drain_timeout_seconds "
                f"({self.drain_timeout_seconds:g}) and engine_shutdown_seconds ({self.engine_shutdown_seconds:g}) "
                f"together ({orderly:g}), or engines are killed while they drain or stop"
            )
        if len(self.admin_ports) < self.shadows + 1:
            raise ValueError(f"{self.shadows + 1} engines need as many admin ports; got {len(self.admin_ports)}")
        return self
