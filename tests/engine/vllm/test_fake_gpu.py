"""A pair of engines whose weights and KV cache are memory of a GPU, as far as a fake driver can tell.

It refuses what a GPU would, and new memory of it is no zeros. Engines are forked from a parent that never called it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from gms.client import GmsClient
from tests.engine.vllm.harness import DEADLINE_SECONDS, Driver, EngineProcess
from tests.support.fakecuda import UUID, FakeGpus, built_once
from tests.support.processes import running, until
from workers.memory import MemoryService
from workers.settings import MIB

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS = 48
PROMPT = 600
CACHED = 512
"""Of those tokens, in whole blocks."""
KV_BYTES = 64 * MIB
CHUNK_BYTES = 48 * MIB
"""So that weights and KV cache lie over several, and neither ends where one does."""


class Machine(NamedTuple):
    gpus: FakeGpus
    driver: Driver
    service: MemoryService

    def fork(self, name: str) -> EngineProcess:
        return self.driver.fork(name, msgspec.structs.replace(self.service, engine=name[-1]))

    def kv_generation(self) -> int:
        with GmsClient.connect(
            self.service.path, engine="test", instance="test", device="cuda:0", device_id=UUID.format(0)
        ) as client:
            (pool,) = (pool for pool in client.status().pools if pool.name == "kv")
            return pool.generation


@pytest.fixture(scope="module")
def machine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with (
        tempfile.TemporaryDirectory(prefix="hs-") as short,
        FakeGpus(built_once(tmp_path_factory), memory_bytes=2048 * MIB) as gpus,
    ):
        folder = Path(short)
        settings = {
            "model": str(model_folder),
            "run_dir": short,
            "served_model_name": "smollm2",
            "kv_cache_bytes": KV_BYTES,
            "max_model_len": 1024,
            "capacity": 8,
            "engine_args": ["--enable-prompt-tokens-details"],
        }
        driver = Driver(settings, folder, module="tests.engine.vllm.fake_gpu", env=gpus.environment("engines"))
        try:
            path = folder / "gms.sock"
            arguments = ["--socket", str(path), "--device", "cuda:0", "--chunk-size", str(CHUNK_BYTES)]
            environment = gpus.environment("service", no_context=1)
            with running("gms", "gms", *arguments, log_dir=folder, env=environment):
                until(path.exists, saying="the memory service's socket")
                yield Machine(
                    gpus,
                    driver,
                    MemoryService(
                        socket=str(path),
                        device="cuda:0",
                        engine="test",
                        instance="pod",
                        timeout_seconds=DEADLINE_SECONDS,
                    ),
                )
        finally:
            driver.end()
        assert not gpus.complaints("engines")
        assert not gpus.complaints("service")


def test_a_life_on_a_gpu_and_a_promotion(machine: Machine) -> None:
    epochs = itertools.count(1)
    assert not machine.gpus.calls("engines"), "the parent leaves the GPU to its engines"
    writer = machine.fork("engine-a")
    try:
        memory = writer.status()["memory"]
        assert (memory["weights_role"], memory["weights_outside_gms_bytes"], memory["kv_mapped"]) == (
            "writer",
            0,
            False,
        )
        assert KV_BYTES - 4 * MIB < memory["kv_bytes"] <= KV_BYTES
        writer.wake(next(epochs))
        wanted = writer.token_ids(TOKENS)
        assert cached(writer) == 0
        assert cached(writer) >= CACHED
        before = len(machine.gpus.calls("engines"))
        reader = machine.fork("engine-b")
        try:
            memory = reader.status()["memory"]
            assert (memory["weights_role"], memory["weights_outside_gms_bytes"]) == ("reader", 0)
            assert 0 < memory["other_bytes"] < memory["weights_bytes"] // 50
            for _ in range(2):
                answer = reader.control("self-test")
                assert answer.status_code == 200, answer.text
            generation = machine.kv_generation()
            writer.kill()  # while it is active
            reader.wake(next(epochs))
            assert cached(reader) >= CACHED, "the pages and their index went from one engine to the next"
            assert reader.token_ids(TOKENS) == wanted
            reader.park()
            reader.wake(next(epochs))
            assert reader.token_ids(TOKENS) == wanted
            reader.park()
            answer = reader.control("self-test")  # what it was last asked is none of the test's input
            assert answer.status_code == 200, answer.text
            _in_order(machine.gpus.calls("engines")[before:])
        finally:
            reader.kill()
    finally:
        writer.kill()
    assert machine.kv_generation() == generation, "the pages went from one engine to the next"


def cached(engine: EngineProcess) -> int:
    """How many tokens of a prompt of PROMPT were in the prefix cache."""
    prompt = [3 + number * 7 % 1000 for number in range(PROMPT)]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = engine.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _in_order(calls: list[str]) -> None:
    """What the second engine did: nothing is unmapped before the device is at rest, a wake ends at rest, and scratch is
    zeroed before a kernel can read it, pages if nothing is in them that could be used."""
    for before, call in itertools.pairwise(calls):
        if call == "cuMemUnmap":
            assert before in ("cuMemUnmap", "SYNC"), before
    mapped = [at for at, call in enumerate(calls) if call == "cuMemSetAccess"]
    weights, *later = mapped
    assert "cuMemsetD8" not in calls[weights : later[0]], "weights are not written to"
    for at in later:
        following = next(call for call in calls[at:] if call in ("cuMemsetD8", "cuMemUnmap", "SYNC", "AWAKE"))
        said = [call for call in calls[:at] if call in ("WAKE", "AWAKE")]
        assert following == ("SYNC" if said[-1:] == ["WAKE"] else "cuMemsetD8")
    assert calls.count("WAKE") == calls.count("AWAKE") == 2
    for at, call in enumerate(calls):
        if call == "AWAKE":
            assert calls[at - 1] == "SYNC"
