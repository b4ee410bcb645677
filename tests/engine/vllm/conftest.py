"""One preloaded parent, one memory service and one folder for all engine tests; engines are forked where needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.vllm.harness import DEADLINE_SECONDS, Driver
from tests.support.processes import running, until
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


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryService]:
    folder = tmp_path_factory.mktemp("gms")
    folder.chmod(0o700)
    path = folder / "gms.sock"
    with running("gms", "gms", "--socket", str(path), log_dir=folder):
        until(path.exists, saying="the memory service's socket")
        yield MemoryService(
            socket=str(path), device="cpu:0", engine="test", instance="pod", timeout_seconds=DEADLINE_SECONDS
        )
