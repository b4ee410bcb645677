"""One preloaded parent, one memory service and one folder for all engine tests; engines are forked where needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.vllm import tiny_llama
from tests.engine.vllm.harness import DEADLINE_SECONDS, Driver
from tests.engine.vllm.resuming import Pair, fork_pair
from tests.support.processes import running, until
from workers.engines.vllm.arguments import ASYNC_SCHEDULER
from workers.memory import MemoryService
from workers.settings import MIB

KV_BYTES = 64 * MIB
MAX_MODEL_LEN = 1024


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, in a folder whose checkpoint may be taken away."""
    from workers.engines.vllm.smollm2 import ensure_embedded_model

    folder = tmp_path_factory.mktemp("model")
    for path in ensure_embedded_model().iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on what a model says: engines of it start, and answer, in a fraction of the time."""
    return tiny_llama.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def driver(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("e")
    settings = {
        "model": str(model_folder),
        "run_dir": str(folder),
        "served_model_name": "smollm2",
        "kv_cache_bytes": KV_BYTES,
        "max_model_len": MAX_MODEL_LEN,
        "capacity": 8,
    }
    driver = Driver(settings, folder)
    try:
        yield driver
    finally:
        driver.end()


@contextmanager
def memory_service(folder: Path) -> Iterator[MemoryService]:
    """A memory service of its own; ``folder`` is empty."""
    folder.chmod(0o700)
    path = folder / "gms.sock"
    with running("gms", "gms", "--socket", str(path), log_dir=folder):
        until(path.exists, saying="the memory service's socket")
        yield MemoryService(
            socket=str(path), device="cpu:0", engine="test", instance="pod", timeout_seconds=DEADLINE_SECONDS
        )


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryService]:
    with memory_service(tmp_path_factory.mktemp("gms")) as service:
        yield service


@pytest.fixture(scope="session")
def resume_pair(driver: Driver) -> Iterator[Pair]:
    """As engines usually are."""
    yield from fork_pair(driver, "resume", "--enable-auto-tool-choice", "--tool-call-parser=hermes")


@pytest.fixture(scope="session")
def other_pair(driver: Driver) -> Iterator[Pair]:
    """With a reasoning parser, vLLM's other scheduler, a prefill in small chunks, and usage that tells what came from
    the prefix cache."""
    yield from fork_pair(
        driver,
        "other",
        "--reasoning-parser=qwen3",
        "--max-num-batched-tokens=64",
        "--enable-prompt-tokens-details",
        scheduler=ASYNC_SCHEDULER,
    )
