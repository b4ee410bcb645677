"""Settings of the worker's processes: the only place in ``workers`` that reads the environment.

Every field can be set by an environment variable (``HOTSPARE_`` + the field's name) and by a command-line flag (the
field's name with dashes); flags win. Values that contradict each other refuse to start, with a sentence.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gms.legible import not_text
from workers.contract import parse_worker_tokens
from workers.engine import EngineConfigError
from workers.engines.catalogue import find
from workers.engines.vllm import build
from workers.heartbeat import BEAT_PERIOD_SECONDS
from workers.route_groups import RouteGroup

MIB = 1024 * 1024

DEFAULT_RUN_DIR = Path(".hotspare")

_MOST_SHOWN: Final = 200
"""Characters of a value that a refusal repeats."""
_ENGINE_ID: Final = r"^[a-z]$"
_POD_NAME: Final = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
_DEVICE: Final = r"^(cpu|cuda):[0-9]{1,3}$"
_IN_WORDS: Final = {
    _ENGINE_ID: "an engine's id is one small letter",
    _POD_NAME: "a pod's name is small letters, digits, dots and dashes, 63 at most, a letter or digit first and last",
    _DEVICE: "a device is cpu:N or cuda:N, with its number from 0 on",
}
"""What a pattern asks for, for people."""

EngineId = Annotated[str, StringConstraints(pattern=_ENGINE_ID)]
PodName = Annotated[str, StringConstraints(pattern=_POD_NAME)]
Port = Annotated[int, Field(ge=1, le=65535)]

SECRET = frozenset({"worker_token"})
"""Settings whose values are repeated nowhere, and which have no flag: whoever may list processes can read those."""

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

MAX_SHADOWS = 7
"""A pod has ten ports: one to serve on, one for each engine, and the memory service's last."""

MIN_BEAT_TIMEOUT_SECONDS = 3 * BEAT_PERIOD_SECONDS
"""With less, one late beat of a busy machine would cost a healthy engine its life."""
MAX_HEARTBEAT_SECONDS = 1.5
"""A gateway waits 3.5 s for one before it suspects the worker: one may come late, or get lost."""
MIN_STEP_SECONDS = 0.1
"""Of what an engine does once: with less time for it no engine ever would come through."""
KILL_MARGIN_SECONDS = 10.0
MAX_UNIX_PATH_BYTES = 107
"""``sun_path`` holds 108 bytes with its terminating zero (unix(7))."""


def _split_commas(value: object) -> object:
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


def _known_engine(name: str) -> str:
    """Whether it exists is known without importing it; whether it fits is the engine process's to find out."""
    try:
        return find(name).name
    except EngineConfigError as error:
        raise ValueError(str(error)) from error


def _for_engine(device: str, info: ValidationInfo) -> str:
    """Whether an engine of ours computes there is known without importing it; another's is its own to say."""
    engine = info.data.get("engine")
    if build.on_gpu(device) and engine == "sim":
        raise ValueError("the sim engine computes on the CPU; choose cpu:N")
    if build.on_gpu(device) and engine == "vllm":
        try:
            build.check_device(device)
        except EngineConfigError as error:
            raise ValueError(str(error)) from error
    return device


def _token(value: SecretStr) -> SecretStr:
    (token,) = parse_worker_tokens(value.get_secret_value().encode())
    return SecretStr(token)


OptionalPath = Annotated[Path | None, BeforeValidator(_unset_if_empty)]
Ports = Annotated[tuple[Port, ...], NoDecode, BeforeValidator(_split_commas)]
"""Comma-separated in a flag or an environment variable."""
EngineName = Annotated[str, AfterValidator(_known_engine)]
Arguments = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_arguments)]
"""As a shell would split them."""
RouteGroups = Annotated[tuple[RouteGroup, ...], NoDecode, BeforeValidator(_split_commas)]


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
"""Upper or lower case: what people write for Python's logging is understood, too."""


class SettingsError(Exception):
    """The settings cannot be used; the message is a sentence for the person who made them."""


def load_settings(cls: type[SettingsT], flags: dict[str, Any]) -> SettingsT:
    """Settings from the environment, overridden by ``flags`` (field name → value).

    Raises:
        SettingsError: a value does not fit; names the variable, what is wrong and what was given.
    """
    if sentences := not_text(os.environ, flags):
        raise SettingsError("; ".join(sentences))
    try:
        return cls(**flags)
    except ValidationError as error:
        sentences = []
        for problem in error.errors(include_url=False):
            name = _variable(cls, error.title, problem["loc"], flags=flags)
            pattern = problem.get("ctx", {}).get("pattern", "")
            message = _IN_WORDS.get(pattern, problem["msg"].removeprefix("Value error, "))
            given = problem.get("input")
            secret = bool(problem["loc"]) and problem["loc"][0] in SECRET
            shown = "" if secret or isinstance(given, dict) else f" (given: {_shortened(repr(given))})"
            where = f"{name}{shown}: " if name and (secret or shown) else ""
            sentences.append(f"{where}{message}")
        raise SettingsError("; ".join(sentences)) from error


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _variable(cls: type[BaseSettings], failed: str, location: tuple[int | str, ...], *, flags: Container[str]) -> str:
    """The variable behind a problem; "" if it is about several. ``failed`` is the class that refused: ``cls``, or
    settings nested in it, which have a prefix of their own. Of a setting's several names it is the one that is set,
    unless one of ``flags`` set it.
    """
    nested = {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseSettings)
    }
    owner = next((other for other in nested.values() if other.__name__ == failed), cls)
    if location and location[0] in nested:
        owner, location = nested[str(location[0])], location[1:]
    if not location:
        return ""
    name = f"{owner.model_config.get('env_prefix', '')}{str(location[0]).upper()}"
    alias = owner.model_fields[str(location[0])].validation_alias if location[0] in owner.model_fields else None
    others = [str(other) for other in alias.choices[1:]] if isinstance(alias, AliasChoices) else []
    given = {variable.upper() for variable in os.environ} if location[0] not in flags else set()
    return next((other for other in others if other in given), name)


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
    restart_seconds: Annotated[float | None, Field(ge=0, le=3600), BeforeValidator(_unset_if_empty)] = None
    """The same for an engine that takes the place of one of the same name, in the pod's life. Unset: as the first."""
    prefill_tokens_per_second: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    """Above 0, the time of an accelerator is simulated, and ``ttft_seconds`` and ``token_seconds`` mean nothing: this
    is how many tokens of prompts it computes in a second, alone and for all requests together. A step takes
    ``step_seconds``, for each sequence that decodes ``sequence_seconds``, for each token of these sequences' contexts
    ``context_token_seconds``, and what its chunk of prompts takes at this rate. ``GET /accelerator`` on the serving
    port says what it did, and whether the machine was fast enough to hold these times."""
    step_seconds: Annotated[float, Field(ge=0, le=60)] = 0.008
    """Of a simulated accelerator: what each step takes, whatever is in it."""
    sequence_seconds: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of a simulated accelerator: what each sequence that decodes adds to a step."""
    context_token_seconds: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of a simulated accelerator: what each token of context of these sequences adds to a step."""
    chunk_tokens: Annotated[int, Field(ge=1, le=1 << 22)] = 2048
    """Of a simulated accelerator: most tokens of prompts in a step."""
    kv_tokens: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Of a simulated accelerator: how many tokens of prompts and answers it has room for at a time; what does not fit
    waits. 0: no limit but ``capacity``."""
    weights_bytes: Annotated[int, Field(ge=4096, le=1 << 40)] = 8 * MIB
    """Size of its weights."""
    kv_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 16 * MIB
    """Size of its KV cache."""
    max_model_len: Annotated[int, Field(ge=16, le=1 << 22)] = 131072
    """Most tokens of a prompt and its answer together."""
    poison_text: str = ""
    """A fault for tests: a prompt that contains this text kills the engine before its first token; with ``@K`` at the
    end of the text, after every K-th. Empty: none does."""


class WorkerSettings(BaseSettings):
    """What every process of a pod must agree on."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_", extra="ignore", populate_by_name=True)

    engine: EngineName = "vllm"
    """``vllm``; ``sim``, a deterministic engine without a model; any other one that is installed (``hotspare engines``
    lists them); or a class as ``module:Class``."""
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
    """Requests and watches on the serving port must show this token, or one of the file's; without either, every client
    is answered. Gateways have the same setting. It has no flag: those can be read by others."""
    worker_token_file: OptionalPath = None
    """Tokens, one a line, all of them accepted; ``#`` begins a comment. Read again within seconds when it changes."""
    device: Annotated[str, AfterValidator(_for_engine), StringConstraints(pattern=_DEVICE)] = "cpu:0"
    """Where engines compute, and whose memory it is: ``cpu:N``, or ``cuda:N`` where the installed vLLM is a build for
    GPUs (docs/gpu.md; not run on hardware)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] = 1
    """Ranks of each engine, every one a process with a device and a memory service of its own: ``device`` and those
    that follow it. The sim engine has them, and vLLM on CPUs, for models whose heads can be shared between them."""
    log_format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""
    log_level: LogLevel = "info"
    """Least level that is logged; upper or lower case."""
    parent_pid: Annotated[int, Field(gt=0)] | None = None
    """Die when this process, the parent, dies. Set by the parent on one machine; unset in a container."""
    drain_mode: Literal["handover", "wait"] = "handover"
    """What becomes of the requests of an active engine that is told to stop: ``handover``, its spare takes them over
    and it ends at once, or, without a spare that is ready, as ``wait``: it answers them to their end."""
    grace_period_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            validation_alias=AliasChoices(
                "grace_period_seconds",
                "HOTSPARE_GRACE_PERIOD_SECONDS",
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
            ),
        ),
    ] = 5.0
    """How long an engine that waits for its requests still takes new ones, after it has said that it drains: from
    gateways that have not heard of it. Over at once when no gateway watches it any more."""
    shutdown_timeout_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            validation_alias=AliasChoices(
                "shutdown_timeout_seconds",
                "HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS",
                "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
            ),
        ),
    ] = 900.0
    """How long it may take until the requests of a terminating engine have ended, its grace period included; the rest
    is cut then."""
    engine_shutdown_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long an engine may take to stop after its requests have ended; if it is silent for longer it is killed."""

    @property
    def pod_dir(self) -> Path:
        """The folder of this pod: lock, sockets, pod.json."""
        return self.run_dir / self.pod

    @property
    def lock_path(self) -> Path:
        return self.pod_dir / "active.lock"

    @property
    def devices(self) -> tuple[str, ...]:
        """One for each rank."""
        kind, _, first = self.device.partition(":")
        return tuple(f"{kind}:{int(first) + rank}" for rank in range(self.tensor_parallel_size))

    @property
    def gms_socket(self) -> Path:
        """Of the first device's memory service."""
        return self.gms_socket_of(self.device)

    def gms_socket_of(self, device: str) -> Path:
        return self.pod_dir / f"gms-{device.replace(':', '-')}.sock"

    @model_validator(mode="after")
    def _grace_within_timeout(self) -> Self:
        if self.grace_period_seconds > self.shutdown_timeout_seconds:
            raise ValueError(
                f"grace_period_seconds ({self.grace_period_seconds:g}) is a part of shutdown_timeout_seconds "
                f"({self.shutdown_timeout_seconds:g}) and cannot be longer; shorten the one or lengthen the other"
            )
        return self

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
    heartbeat_seconds: Annotated[float, Field(gt=0, le=MAX_HEARTBEAT_SECONDS)] = 1.0
    """The watch says something at least this often. A gateway takes a worker for suspect that it has not heard for its
    own ``heartbeat_timeout_seconds`` (3.5), so that two heartbeats must fit into them."""
    beat_timeout_seconds: Annotated[float, Field(ge=MIN_BEAT_TIMEOUT_SECONDS, le=3600)] = 3.0
    """The keeper kills an engine whose event loop gave no beat for this long."""
    init_beat_timeout_seconds: Annotated[float, Field(ge=MIN_BEAT_TIMEOUT_SECONDS, le=3600)] = 60.0
    """``beat_timeout_seconds`` before the engine is initialised: loading weights may hold the loop up for a while."""
    initialize_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=86400)] = 1800.0
    """How long an engine may take until it is parked for the first time: weights read, or another engine's waited for,
    and warmed up. One that takes longer hangs, and is ended; its keeper forks another."""
    step_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=86400)] = 120.0
    """The keeper kills an engine that took no step for this long while requests run."""
    token_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=86400)] = 300.0
    """An engine none of whose requests gets a token further for this long is replaced, though it makes steps."""
    health_check_seconds: Annotated[float, Field(ge=0.05, le=600)] = 2.0
    """How often the active engine is looked at."""
    private_memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """An engine with more memory of its own than this (the memory service's not counted) is replaced in order; 0: no
    limit."""
    self_test_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """How often a parked engine tests whether it could take over; 0: never. One that fails is replaced."""
    self_test_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=600)] = 10.0
    """How long a self-test may take."""
    handover_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Of a hand-over: how long the step in hand may take, and then the spare to serve. After that this engine goes on.
    Streams pause meanwhile. Before that, a spare may take as long (1 s at least, 10 at most; 1 if another one answers)
    to say that it would take over. Less for an engine that was told to stop, if little of ``shutdown_timeout_seconds``
    is left."""
    graceful_shutdown_except: RouteGroups = ()
    """Routes whose requests a terminating engine does not wait for, comma separated: ``chat``, ``completions``,
    ``responses``, ``messages``, ``audio``, ``pooling`` (embeddings, scores and the like), ``other``. They are cut once
    no new ones are taken, and gateways take them elsewhere."""
    bind_timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long a promoted engine tries to get the serving port."""
    wake_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=600)] = 10.0
    """How long a promoted engine may take to wake, beside its waits for the memory service; one that takes longer is
    ended, and the next engine has its turn."""
    promotion_check_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=60)] = 2.0
    """How long a promoted engine may take to answer itself over the serving port. It counts as active only then."""
    memory_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long to wait for the memory service to do what another engine holds up: its commit of the weights."""
    memory_wait_seconds: Annotated[float, Field(ge=0, le=600)] = 15.0
    """How long to wait for room in the memory service: what a dead engine held is given back in a moment."""
    memory_connect_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=600)] = 10.0
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
    """Further arguments for the engine: vLLM's as ``vllm serve`` takes them, another one's as its own page says."""
    kv_carry_over: bool = True
    """Whether a promoted engine takes over the prefix cache of the engine before it, whose KV pages it gets."""
    sim: SimSettings = Field(default_factory=SimSettings)

    @model_validator(mode="after")
    def _handover_within_timeout(self) -> Self:
        given = "handover_timeout_seconds" in self.model_fields_set and self.drain_mode == "handover"
        if given and self.handover_timeout_seconds > self.shutdown_timeout_seconds:
            raise ValueError(
                f"handover_timeout_seconds ({self.handover_timeout_seconds:g}) is a part of shutdown_timeout_seconds "
                f"({self.shutdown_timeout_seconds:g}) and cannot be longer; shorten the one or lengthen the other"
            )
        return self

    @model_validator(mode="after")
    def _ports_are_two(self) -> Self:
        _refuse_equal([("serving_port", self.serving_port), ("admin_port", self.admin_port)])
        for name, port in (("serving_port", self.serving_port), ("admin_port", self.admin_port)):
            if port in self.standby_admin_ports:
                raise ValueError(
                    f"standby_admin_ports are the pod's other engines', and {port} is this one's {name}; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        if self.init_beat_timeout_seconds < self.beat_timeout_seconds:
            raise ValueError(
                f"init_beat_timeout_seconds ({self.init_beat_timeout_seconds:g}) cannot be shorter than "
                f"beat_timeout_seconds ({self.beat_timeout_seconds:g}): an engine that initialises holds its loop up "
                "for longer than one that serves; lengthen the one or shorten the other"
            )
        if self.health_check_seconds > self.token_timeout_seconds:
            raise ValueError(
                f"health_check_seconds ({self.health_check_seconds:g}) cannot be longer than token_timeout_seconds "
                f"({self.token_timeout_seconds:g}): nobody would look in time; shorten the one or lengthen the other"
            )
        return self


class PodSettings(WorkerSettings):
    """The supervisor of one pod on this machine."""

    shadows: Annotated[int, Field(ge=0, le=MAX_SHADOWS)] = 1
    """Spare engines. They take over one after the other; with 0 the engine that died is forked anew."""
    admin_ports: Ports = tuple(range(8101, 8102 + MAX_SHADOWS))
    """Admin ports of the engines, comma separated, one each; those beyond the last engine are not used."""
    gms_metrics_port: Annotated[int, Field(ge=0, le=65535)] = 8109
    """Where the memory service serves /metrics; 0: nowhere."""
    more_gms_metrics_ports: Ports = ()
    """With several ranks, where the memory services of the further ones do, comma separated, rank 1's first; those
    without one serve none."""
    gms_memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """Most that the memory service may hold; 0: no limit but the machine's."""
    liveness_period_seconds: Annotated[float, Field(ge=0.01, le=600)] = 2.0
    """How often each engine is asked whether it lives."""
    liveness_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=600)] = 2.0
    """How long its answer may take."""
    liveness_failures: Annotated[int, Field(ge=1, le=100)] = 5
    """So many failures in a row, and the engine is killed."""
    startup_timeout_seconds: Annotated[float, Field(ge=MIN_STEP_SECONDS, le=86400)] = 600.0
    """Liveness does not count before an engine's first answer, for at most this long."""
    kill_after_seconds: Annotated[float | None, Field(gt=0, le=172800), BeforeValidator(_unset_if_empty)] = None
    """SIGTERM to SIGKILL, if an engine does not end by itself. Unset: ``shutdown_timeout_seconds``,
    ``engine_shutdown_seconds`` and 10 seconds to spare."""

    @property
    def engine_stop_seconds(self) -> float:
        """SIGTERM to SIGKILL."""
        orderly = self.shutdown_timeout_seconds + self.engine_shutdown_seconds
        return orderly + KILL_MARGIN_SECONDS if self.kill_after_seconds is None else self.kill_after_seconds

    @model_validator(mode="after")
    def _kill_after_orderly_end(self) -> Self:
        orderly = self.shutdown_timeout_seconds + self.engine_shutdown_seconds
        if self.kill_after_seconds is not None and self.kill_after_seconds <= orderly:
            raise ValueError(
                f"kill_after_seconds ({self.kill_after_seconds:g}) must be longer than shutdown_timeout_seconds "
                f"({self.shutdown_timeout_seconds:g}) and engine_shutdown_seconds ({self.engine_shutdown_seconds:g}) "
                f"together ({orderly:g}), or engines are killed while they drain or stop"
            )
        if len(self.admin_ports) < self.shadows + 1:
            raise ValueError(f"{self.shadows + 1} engines need as many admin ports; got {len(self.admin_ports)}")
        return self

    @model_validator(mode="after")
    def _ports_are_several(self) -> Self:
        used = [("serving_port", self.serving_port)]
        used += [("admin_ports", port) for port in self.admin_ports[: self.shadows + 1]]
        if self.gms and self.gms_metrics_port:
            used.append(("gms_metrics_port", self.gms_metrics_port))
        if self.gms:
            more = self.more_gms_metrics_ports[: self.tensor_parallel_size - 1]
            used += [("more_gms_metrics_ports", port) for port in more]
        _refuse_equal(used)
        return self


def _refuse_equal(used: Sequence[tuple[str, int]]) -> None:
    """Two listeners cannot have one port: the second would be tried again and again. ``used``: settings and ports."""
    first: dict[int, str] = {}
    for name, port in used:
        other = first.setdefault(port, name)
        if other is not name:
            raise ValueError(
                f"{other} and {name} are both {port}; choose another one for {_names(other)} or {_names(name)}"
            )
        if sum(given == (name, port) for given in used) > 1:
            whose = "engine" if name == "admin_ports" else "memory service"
            raise ValueError(f"{name} has {port} twice; each {whose} needs one of its own ({_names(name)})")


def _names(setting: str) -> str:
    return f"--{setting.replace('_', '-')} (HOTSPARE_{setting.upper()})"
