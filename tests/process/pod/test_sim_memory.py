"""The sim engine over the real memory service: who writes the weights, and what happens where memory is not mapped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from tests.process.pod.pods import ROOT
from tests.support.processes import running, until, until_role
from workers.engine import EngineMemory
from workers.engines.sim import SimEngine
from workers.engines.sim.memory import SimWeights, layout_key
from workers.engines.sim.tokens import encode, expected_tokens
from workers.memory import MemoryService
from workers.ports import PortReservation
from workers.settings import EngineSettings, SimSettings

pytestmark = pytest.mark.process

SIM = SimSettings(ttft_seconds=0, token_seconds=0, weights_bytes=1 << 20, kv_bytes=1 << 16, seed=5)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MemoryService]:
    socket = tmp_path / "gms.sock"
    with running("gms", "gms", "--socket", str(socket), "--device", "cpu:0", log_dir=tmp_path):
        yield MemoryService(socket=str(socket), device="cpu:0", engine="a", instance="life-1", timeout_seconds=10)


@contextlib.asynccontextmanager
async def engine(service: MemoryService, sim: SimSettings = SIM) -> AsyncIterator[SimEngine]:
    settings = EngineSettings(engine="sim", capacity=4, sim=sim)
    made = SimEngine(settings, service, Path(service.socket).parent)
    try:
        await made.initialize()
        yield made
    finally:
        await made.shutdown()


async def generate(made: SimEngine, prompt: str, count: int) -> list[int]:
    found: list[int] = []
    with contextlib.closing(made._scheduler.submit(encode(prompt), max_tokens=count)) as generation:
        async with asyncio.timeout(10):
            while new := await generation.pull():
                found += new
    return found


def expected(prompt: str, count: int, sim: SimSettings = SIM) -> list[int]:
    return expected_tokens(encode(prompt), count, seed=sim.seed, weights_bytes=sim.weights_bytes)


async def test_the_first_writes_the_weights_and_the_others_read_them(service: MemoryService) -> None:
    async with engine(service) as writer, engine(service) as reader:
        assert writer.memory() == EngineMemory(
            weights_bytes=1 << 20,
            weights_outside_gms_bytes=0,
            weights_role="writer",
            kv_bytes=1 << 16,
            kv_mapped=False,
            kv_index_bytes=12288,
        )
        assert reader.memory().weights_role == "reader"
        assert bytes(writer._weights.words) == bytes(reader._weights.words)
        for epoch, made in ((1, writer), (2, reader)):
            await made.wake(epoch=epoch)
            assert await generate(made, "a prompt", 50) == expected("a prompt", 50)
            await made.park()


async def test_weights_outlive_their_writer(service: MemoryService) -> None:
    async with engine(service) as first:
        assert first.memory().weights_role == "writer"
    async with engine(service) as second:
        assert second.memory().weights_role == "reader"
        await second.wake(epoch=1)
        assert await generate(second, "x", 20) == expected("x", 20)


async def test_engines_with_other_seeds_have_other_weights(service: MemoryService) -> None:
    other = SIM.model_copy(update={"seed": 6})
    async with engine(service), engine(service, other) as made:
        assert made.memory().weights_role == "writer"
        await made.wake(epoch=1)
        assert await generate(made, "x", 20) == expected("x", 20, other)


async def test_wrong_pages_behind_the_weights_show_as_wrong_text(service: MemoryService) -> None:
    """Somebody else wrote this pool: the tokens are read from it, so they are wrong."""
    key = layout_key(SIM)
    with service.connect() as client:
        lease = client.attach(f"weights/{key}", LeaseMode.RW, timeout_seconds=10)
        with lease.allocate("weights", SIM.weights_bytes):
            lease.commit(b'{"layout":"%s","weights_bytes":%d}' % (key.encode(), SIM.weights_bytes))
        async with engine(service) as made:
            await made.wake(epoch=1)
            assert await generate(made, "x", 20) != expected("x", 20)


async def test_a_parked_engine_has_given_its_kv_pages_back(service: MemoryService) -> None:
    async with engine(service) as first, engine(service) as second:
        await first.wake(epoch=1)
        await generate(first, "x", 5)
        await first.park()
        async with asyncio.timeout(5):
            await second.wake(epoch=2)
        with pytest.raises(GmsError):
            await first.wake(epoch=1)
        assert not first.memory().kv_mapped


async def test_no_descriptor_and_no_connection_is_left(service: MemoryService) -> None:
    async with engine(service):
        pass  # what this process opens once, it has now
    before = sorted(os.listdir("/proc/self/fd"))
    for epoch in range(1, 4):
        async with engine(service) as made:
            await made.wake(epoch=epoch)
            await generate(made, "x", 5)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_writer_that_fails_half_way_leaves_nothing_behind(service: MemoryService) -> None:
    weights = SimWeights(SIM, service)
    with service.connect() as client:
        client.attach(f"weights/{layout_key(SIM)}", LeaseMode.RW, timeout_seconds=10)
    assert isinstance(client, GmsClient)
    weights.attach()
    assert weights.role == "writer"
    weights.close()
    weights.close()


async def test_told_to_stop_while_it_waits_for_another_ones_weights(service: MemoryService) -> None:
    async with engine(service):
        pass  # other weights; what this process opens once, it has now
    other = SIM.model_copy(update={"seed": 6})
    before = sorted(os.listdir("/proc/self/fd"))
    with service.connect() as writer:
        writer.attach(f"weights/{layout_key(other)}", LeaseMode.RW, timeout_seconds=10)
        settings = EngineSettings(engine="sim", capacity=4, sim=other)
        made = SimEngine(settings, service, Path(service.socket).parent)
        task = asyncio.create_task(made.initialize())
        await asyncio.to_thread(until, lambda: made._weights._memory._client, saying="it is connected")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await made.shutdown()
            await asyncio.to_thread(until, lambda: not thread_runs("sim-weights"), saying="its wait has ended")
    assert sorted(os.listdir("/proc/self/fd")) == before


def thread_runs(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_told_to_stop_while_it_waits_for_the_memory_service(tmp_path: Path) -> None:
    """There is no memory service: nothing waits for the end of the wait for it."""
    with PortReservation() as serving, PortReservation() as admin:
        env = {
            "HOTSPARE_RUN_DIR": str(tmp_path / "run"),
            "HOTSPARE_ENGINE": "sim",
            "HOTSPARE_SERVING_PORT": str(serving.port),
            "HOTSPARE_ADMIN_PORT": str(admin.port),
        }
        with running("engine", "workers", "engine", log_dir=tmp_path, env=env) as process:
            until_role(admin.port, "INIT")
            process.signal(signal.SIGTERM)
            assert process.wait(seconds=5) == 0


IN_A_PROCESS = """
import asyncio, sys
from pathlib import Path
from workers.engines.sim import SimEngine, SimFault
from workers.memory import MemoryService
from workers.settings import EngineSettings, SimSettings

async def main() -> None:
    service = MemoryService(socket=sys.argv[1], device="cpu:0", engine="a", instance="life-1", timeout_seconds=10)
    settings = EngineSettings(engine="sim", capacity=4, sim=SimSettings(kv_bytes=65536))
    engine = SimEngine(settings, service, Path("."))
    await engine.initialize()
    await engine.wake(epoch=1)
    {then}

asyncio.run(main())
"""


def in_a_process(service: MemoryService, then: str) -> subprocess.Popen[str]:
    program = IN_A_PROCESS.replace("{then}", then)
    return subprocess.Popen(
        [sys.executable, "-c", program, service.socket],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_token_made_without_kv_pages_ends_the_process(service: MemoryService) -> None:
    then = """
    await engine.park()
    engine._scheduler.resume()
    engine._scheduler.submit([1], max_tokens=1)
    await asyncio.sleep(10)
    """
    with in_a_process(service, then) as process:
        assert process.wait(10) == -signal.SIGSEGV


def test_a_hung_loop_ends_on_sigkill_only(service: MemoryService) -> None:
    then = """
    import signal
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("term", flush=True))
    engine.inject(SimFault.HANG_LOOP)
    print("injected", flush=True)
    await asyncio.sleep(0)
    print("the loop runs", flush=True)
    """
    with in_a_process(service, then) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "injected\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert process.stdout.read() == ""
