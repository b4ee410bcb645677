"""The memory service on a real driver: killed and started again, short of memory, and pages that changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gms.client import GmsError
from tests.gpu.gpu_bench import GpuBench
from tests.gpu.harness import Machine
from tests.process.gms.bench import Agent, Device
from tests.process.gms.processes import until

POOL = "weights/model"


@pytest.fixture
def bench(device: Device) -> Iterator[GpuBench]:
    """With small chunks: everything here has several."""
    with GpuBench(device, "--chunk-size", str(2 * device.unit), "--adopt-timeout-seconds", "30") as made:
        yield made


def held_weights(bench: GpuBench, engine: str) -> Agent:
    """Wrote them, or reads what another wrote, and keeps them."""
    holder = bench.agent(engine)
    if holder.do("attach", pool=POOL, mode="rw_or_ro")["mode"] == "rw":
        holder.do("allocate", pool=POOL, tag="w", size_bytes=5 * bench.device.unit)
        holder.do("map", pool=POOL, tag="w", writable=True)
        holder.do("write", pool=POOL, tag="w", offset=4 * bench.device.unit, text="weights")
        holder.do("commit", pool=POOL, manifest="m")
        holder.do("map", pool=POOL, tag="w", writable=False)
    else:
        holder.read_weights(POOL, 7, offset=4 * bench.device.unit)
    holder.do("keep", pool=POOL)
    return holder


def weights(bench: GpuBench, holder: Agent) -> str:
    return str(holder.do("read", pool=POOL, tag="w", offset=4 * bench.device.unit, length=7))


def until_restored(holder: Agent, pool: str, times: int) -> None:
    until(
        lambda: holder.do("custody", pool=pool) == {"phase": "HELD", "restored": times, "reason": ""},
        f"{pool} is handed back",
    )


def test_a_killed_service_gets_its_pages_back_and_a_promotion_goes_on_from_there(bench: GpuBench) -> None:
    """Twice; and the memory is what it was before: no page is there a second time, and none is lost."""
    unit = bench.device.unit
    active, shadow = held_weights(bench, "a"), held_weights(bench, "b")
    active.do("connect")
    active.hold_kv(1, size_bytes=3 * unit)
    active.write_kv("cache")
    active.do("keep", pool="kv")
    for times in (1, 2):
        bench.service.kill()
        assert (weights(bench, active), weights(bench, shadow), active.kv(5)) == ("weights", "weights", "cache")
        bench.start("--chunk-size", str(2 * unit))
        for holder, pool in ((active, POOL), (shadow, POOL), (active, "kv")):
            until_restored(holder, pool, times)
        with bench.connect() as client:
            assert client.status().total_bytes == 8 * unit
    active.kill()
    shadow.do("connect")
    lease, created = shadow.hold_kv(2, size_bytes=3 * unit)
    assert (lease["fresh"], created, shadow.kv(5)) == (False, False, "cache")
    third = held_weights(bench, "c")
    assert weights(bench, third) == "weights"
    assert third.do("verify_kept", pool=POOL) == 5 * unit


def test_more_than_the_gpu_has_is_refused_and_nothing_of_it_is_left(machine: Machine, device: Device) -> None:
    """The service has no limit of its own here: it is the driver that says no, after many chunks."""
    memory_bytes = machine.share(machine.free_bytes, 64 << 20)
    chunk_bytes = machine.share(512 << 20, 4 << 20)
    with GpuBench(device, "--chunk-size", str(chunk_bytes), memory_bytes=memory_bytes) as bench:
        agent = bench.agent("a")
        agent.do("attach", pool=POOL, mode="rw")
        with pytest.raises(GmsError) as caught:
            agent.do("allocate", pool=POOL, tag="w", size_bytes=2 * machine.free_bytes)
        assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
        with bench.connect() as client:
            assert client.status().total_bytes == 0
        agent.do("allocate", pool=POOL, tag="w", size_bytes=chunk_bytes)
        agent.do("map", pool=POOL, tag="w", writable=True)
        agent.do("write", pool=POOL, tag="w", offset=0, text="works")
        agent.do("commit", pool=POOL)


def test_pages_that_changed_after_their_commit_are_found_and_written_anew(bench: GpuBench) -> None:
    """Nothing seals memory of a GPU: a writer that keeps its mapping can change it, and digests are what tells."""
    writer, reader = bench.agent("a"), bench.agent("b")
    writer.do("attach", pool=POOL, mode="rw")
    writer.do("allocate", pool=POOL, tag="w", size_bytes=3 * bench.device.unit)
    writer.do("map", pool=POOL, tag="w", writable=True)
    writer.do("write", pool=POOL, tag="w", offset=0, text="weights")
    writer.do("commit", pool=POOL, keep=True)
    reader.do("attach", pool=POOL, mode="ro")
    assert reader.read_weights(POOL, 7) == "weights"
    assert reader.do("verify", pool=POOL) == 3 * bench.device.unit
    writer.do("write", pool=POOL, tag="w", offset=2 * bench.device.unit + 1, text="!")
    with pytest.raises(GmsError, match="is corrupt") as caught:
        reader.do("verify", pool=POOL)
    assert caught.value.code == "corrupt"
    with pytest.raises(GmsError) as caught:
        bench.agent("c").do("attach", pool=POOL, mode="ro")
    assert caught.value.code == "corrupt"
    assert bench.agent("d").do("attach", pool=POOL, mode="rw_or_ro")["mode"] == "rw"
    assert reader.do("read", pool=POOL, tag="w", offset=0, length=7) == "weights"
