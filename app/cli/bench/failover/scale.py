"""[P] What is run, in the figures of the experiment that it follows, and how that is made to fit into less time.

A *plan* is written in real seconds and tokens. It may be run ``speed`` times as fast, with one token standing for
``group`` of them: then events are fewer by that, and a step of the simulated accelerator stands for as many steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

PODS: Final = 2
CAPACITY: Final = 256
"""Requests at a time of an engine: more than the KV cache has room for, so that they wait at the engine."""
PATIENCE_SECONDS: Final = 600
"""How long a request waits in the gateway for a worker."""

REFERENCE: Final[Mapping[str, float]] = MappingProxyType({"cold": 283.0, "shadow": 7.3})
"""SIGKILL to the second worker serving again, in seconds, as reported for GLM-5.2 on two nodes of eight B200."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerator that is simulated, and what its engines take to start. docs/failover.md says where each figure
    comes from; those of time are seconds."""

    prefill_tokens_per_second: float = 26_000.0
    step_seconds: float = 0.008
    sequence_seconds: float = 0.000_05
    context_token_seconds: float = 1.5e-9
    chunk_tokens: int = 2048
    kv_tokens: int = 1_000_000
    restart_seconds: float = 283.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run; all figures as if nothing were scaled."""

    engine: str
    scale: str
    speed: float
    group: int
    requests_per_second: float
    prompt_tokens: int
    answer_tokens: int
    settle_seconds: float
    """Of load before the kill."""
    observe_seconds: float
    """Of load after it."""
    ttft_limit_seconds: float
    rate_limit: float
    """Tokens a second of one user, below which the service level is missed."""
    model: Model | None
    """None: the engine takes the time that it takes."""

    def seconds(self, real: float) -> float:
        """So long it takes in the run."""
        return real / self.speed

    def tokens(self, real: int) -> int:
        """So many they are in the run."""
        return max(1, round(real / self.group))

    def real_seconds(self, measured: float) -> float:
        return measured * self.speed

    def real_rate(self, measured: float) -> float:
        """Of tokens a second."""
        return measured * self.group / self.speed


def environment(plan: Plan) -> dict[str, str]:
    """What the processes of a run are told beside what makes an arm."""
    found: dict[str, Any] = {
        "HOTSPARE_WAIT_FOR_WORKER_SECONDS": PATIENCE_SECONDS,
        "HOTSPARE_RESUME_WAIT_SECONDS": PATIENCE_SECONDS,
        "HOTSPARE_LOG_FORMAT": "json",
        "HOTSPARE_ACCESS_LOG": "true",
    }
    model = plan.model
    if model is not None:
        steps = plan.group / plan.speed  # one of the run stands for ``group`` real ones
        found |= {
            "HOTSPARE_CAPACITY": CAPACITY,
            "HOTSPARE_SIM_RESTART_SECONDS": plan.seconds(model.restart_seconds),
            "HOTSPARE_SIM_PREFILL_TOKENS_PER_SECOND": model.prefill_tokens_per_second * plan.speed / plan.group,
            "HOTSPARE_SIM_STEP_SECONDS": model.step_seconds * steps,
            "HOTSPARE_SIM_SEQUENCE_SECONDS": model.sequence_seconds * steps,
            "HOTSPARE_SIM_CONTEXT_TOKEN_SECONDS": model.context_token_seconds * plan.group * steps,
            "HOTSPARE_SIM_CHUNK_TOKENS": max(1, round(model.chunk_tokens * steps)),
            "HOTSPARE_SIM_KV_TOKENS": plan.tokens(model.kv_tokens),
        }
    return {name: str(value) for name, value in found.items()}


_SIM: Final = {
    "requests_per_second": 0.7,
    "prompt_tokens": 32_000,
    "answer_tokens": 1_000,
    "settle_seconds": 90.0,
    "observe_seconds": 600.0,
    "ttft_limit_seconds": 5.0,
    "rate_limit": 30.0,
}
_VLLM: Final = {
    "requests_per_second": 1.0,
    "prompt_tokens": 64,
    "answer_tokens": 48,
    "settle_seconds": 15.0,
    "observe_seconds": 60.0,
    "ttft_limit_seconds": 2.0,
    "rate_limit": 5.0,
}
"""For two cores: SmolLM2 on the CPU."""
_VLLM_FULL: Final = {**_VLLM, "observe_seconds": 600.0, "settle_seconds": 60.0}
SHORT: Final = (20.0, 10)
"""``speed`` and ``group``."""


def plan_of(engine: str, scale: str, **given: float | None) -> Plan:
    """The plan of this name, with what is given in place of its own: fields of ``Plan``, and ``restart_seconds``."""
    sim = engine == "sim"
    usual: dict[str, Any] = dict(_SIM if sim else _VLLM if scale == "short" else _VLLM_FULL)
    usual["speed"], usual["group"] = SHORT if sim and scale == "short" else (1.0, 1)
    chosen = {name: value for name, value in given.items() if value is not None}
    restart = chosen.pop("restart_seconds", Model().restart_seconds)
    model = Model(restart_seconds=restart) if sim else None
    return msgspec.convert({"engine": engine, "scale": scale, "model": model, **usual, **chosen}, Plan)
