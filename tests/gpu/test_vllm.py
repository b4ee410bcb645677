"""vLLM's engines on a GPU: two over one memory service, one is killed at work, the other goes on with its pages.

Not run on hardware yet. Needs vLLM as a build for CUDA and hotspare's own packages beside it; without them it is
skipped. With the fake driver it is host memory and a CPU: so the drill itself is kept working.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.harness import MIB, Machine
from tests.gpu.report import Duration, Fact
from tests.gpu.services import Service

STARTS_SECONDS = 200.0
"""The first engine compiles its model, and captures graphs."""
PACKAGES = ("vllm", "pydantic_settings", "uvicorn", "httpx", "xxhash", "uvloop", "prometheus_client")
MODEL_BYTES = 3 << 30
KV_BYTES = 1 << 30
PROMPT = [3 + number * 7 % 1000 for number in range(600)]
CACHED = 500
"""Of its tokens: blocks are of 16 on a GPU, of 128 on a CPU."""


def device_of(machine: Machine) -> str:
    return "cuda:0" if machine.fake is None else "cpu:0"


def unfit(machine: Machine) -> str:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        return f"not installed: {', '.join(missing)}"
    from workers.engine import EngineConfigError
    from workers.engines.vllm import build

    try:
        build.check_device(device_of(machine))
    except EngineConfigError as error:
        return str(error)
    if machine.fake is None and machine.free_bytes < 2 * (MODEL_BYTES + KV_BYTES):
        return f"the GPU has {machine.free_bytes >> 20} MiB free"
    return ""


@contextmanager
def pair(machine: Machine, path: str, folder: Path) -> Iterator[Any]:
    """Forks engines, which are killed at the end."""
    from tests.engine.vllm.harness import Driver
    from workers.engines.vllm.smollm2 import ensure_embedded_model
    from workers.memory import MemoryService

    settings = {
        "model": str(ensure_embedded_model()),
        "device": device_of(machine),
        "run_dir": str(folder),
        "served_model_name": "smollm2",
        "kv_cache_bytes": machine.share(KV_BYTES, 64 * MIB),
        "max_model_len": 1024,
        "capacity": 8,
        "engine_args": ["--enable-prompt-tokens-details"],
    }
    driver, engines = Driver(settings, folder), []
    try:
        machine.report.add(Fact("threads of the parent that forks engines", str(driver.ready.threads), "1"))

        def fork(name: str) -> Any:
            service = MemoryService(
                socket=path,
                device=device_of(machine),
                engine=name,
                instance="pod",
                timeout_seconds=STARTS_SECONDS,
            )
            started = time.monotonic()
            engine = driver.fork(f"engine-{name}", service)
            engines.append(engine)
            machine.report.add(Duration(f"vLLM: engine {name}, forked → parked", (time.monotonic() - started) * 1e3))
            memory = engine.status()["memory"]
            machine.report.add(
                Fact(
                    f"vLLM: weights of engine {name}, outside of the service, other tensors",
                    f"{memory['weights_bytes'] // MIB}, {memory['weights_outside_gms_bytes'] // MIB}, "
                    f"{memory['other_bytes'] // MIB} MiB",
                )
            )
            return engine

        yield fork
    finally:
        for engine in engines:
            engine.kill()
        driver.end()


def cached(engine: Any) -> int:
    """Tokens of the prompt that were in the prefix cache."""
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answer = engine.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def test_an_engine_is_killed_and_its_shadow_goes_on(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := unfit(machine):
        pytest.skip(reason)
    from tests.engine.vllm import harness

    monkeypatch.setattr(harness, "DEADLINE_SECONDS", STARTS_SECONDS)
    with Service(machine, device_of(machine)) as service, pair(machine, service.path, tmp_path) as fork:
        active = fork("a")
        active.wake(1)
        wanted = active.token_ids(48)
        cached(active)
        warm = cached(active)
        shadow = fork("b")
        for _ in range(2):
            answer = shadow.control("self-test")
            assert answer.status_code == 200, answer.text
        generation = _generation(service)
        killed = time.monotonic()
        active.kill()
        shadow.wake(2)
        machine.report.add(Duration("vLLM: SIGKILL → the shadow has the pages", (time.monotonic() - killed) * 1e3))
        carried = cached(shadow)
        machine.report.add(Duration("vLLM: SIGKILL → its first token", (time.monotonic() - killed) * 1e3))
        facts = {
            "vLLM: tokens of both engines": "same" if shadow.token_ids(48) == wanted else "different",
            "vLLM: the pages of the killed engine": "the same" if _generation(service) == generation else "new",
            "vLLM: its prefix cache": "carried over" if min(warm, carried) >= CACHED else f"{carried} of {warm} tokens",
        }
        shadow.park()
        shadow.wake(3)
        facts["vLLM: tokens after a park and a wake"] = "same" if shadow.token_ids(48) == wanted else "different"
        shadow.park()
    relied = dict(zip(facts, ("same", "the same", "carried over", "same"), strict=True))
    for question, found in facts.items():
        machine.report.add(Fact(question, found, relied[question]))
    assert facts == relied


def _generation(service: Service) -> int:
    pool = service.pool("kv")
    assert pool is not None
    return pool.generation
