"""One service per device: who is let in, and what a failing or a slow device does."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import Process, until
from tests.support.fakecuda import UUID

pytestmark = pytest.mark.process

UNIT = 2 << 20


def on(path: Path, device: str) -> GmsClient:
    return GmsClient.connect(path, engine="a", instance="test", device=device)


def test_host_devices_are_services_of_their_own(spawn: Any, folder: Path) -> None:
    paths = {name: folder / f"{name}.sock" for name in ("cpu:0", "cpu:1")}
    for name, path in paths.items():
        spawn(["-m", "gms", "--socket", str(path), "--device", name], {"HOTSPARE_GMS_LOG_LEVEL": "error"})
    with on(paths["cpu:0"], "cpu:0") as first, on(paths["cpu:1"], "cpu:1") as second:
        first.attach("kv", LeaseMode.RW, epoch=7).allocate("pages", 4096).close()
        status = second.status()
        assert (status.device, status.device_id, status.pools, status.total_bytes) == ("cpu:1", "cpu:1", [], 0)
        second.attach("kv", LeaseMode.RW, epoch=1)  # epochs are each device's own
    with pytest.raises(GmsError, match=r"wants cpu:1 \(cpu:1\), this service has cpu:0 \(cpu:0\); use that device's"):
        on(paths["cpu:0"], "cpu:1")


def test_a_socket_whose_holders_live_on_another_device_is_refused(spawn: Any, socket_path: Path) -> None:
    def start(device: str) -> Process:
        arguments = ["-m", "gms", "--socket", str(socket_path), "--device", device]
        return spawn(arguments, {"HOTSPARE_GMS_LOG_LEVEL": "error"})  # type: ignore[no-any-return]

    service = start("cpu:0")
    with on(socket_path, "cpu:0") as client:
        lease = client.attach("kv", LeaseMode.RW, epoch=7)
        with lease.allocate("pages", 4096) as pages:
            service.kill()
            assert start("cpu:1").wait() == 2  # else the engines of cpu:0 would find their pages forgotten
            start("cpu:0")
            with on(socket_path, "cpu:0") as again:
                again.adopt("kv", generation=1, mode=LeaseMode.RW, epoch=7, allocations=[pages])


# GPUs


@pytest.fixture
def bench(gpu: Device) -> Iterator[Bench]:
    with Bench(gpu, "--chunk-size", str(gpu.unit)) as made:
        yield made


def test_a_gpu_is_the_same_whatever_number_it_has(bench: Bench) -> None:
    """CUDA_VISIBLE_DEVICES gives each process numbers of its own."""
    writer, reader = bench.agent("a"), bench.agent("b", device="cuda:1", order="1,0")
    writer.write_weights("weights/w", "by number 0")
    reader.do("attach", pool="weights/w", mode="ro")
    assert reader.read_weights("weights/w", 11) == "by number 0"
    assert reader.do("verify", pool="weights/w") == UNIT
    with bench.connect() as client:
        assert (client.status().device, client.status().device_id) == ("cuda:0", UUID.format(0))


@pytest.mark.parametrize(("device", "order"), [("cuda:0", "1,0"), ("cuda:1", "0,1")])
def test_another_gpu_is_refused_though_it_has_the_same_number(bench: Bench, device: str, order: str) -> None:
    agent = bench.agent(device=device, order=order, connect=False)
    with pytest.raises(GmsError) as caught:
        agent.do("connect")
    assert (caught.value.code, caught.value.retryable) == ("wrong_device", False)
    assert f"wants {device} ({UUID.format(1)}), this service has cuda:0 ({UUID.format(0)})" in str(caught.value)


def test_each_gpu_has_its_own_memory(gpu: Device) -> None:
    with Bench(gpu, memory_bytes=4 * UNIT) as bench:
        other = bench.start_other("cuda:1")
        a, b = bench.agent("a"), bench.agent("b", device="cuda:1", path=other)
        for agent in (a, b):
            agent.hold_kv(1, size_bytes=4 * UNIT)
        a.write_kv("on 0")
        b.write_kv("on 1")
        assert [a.kv(4), b.kv(4)] == ["on 0", "on 1"]
        a.do("attach", pool="weights/w", mode="rw")
        with pytest.raises(GmsError) as caught:
            a.do("allocate", pool="weights/w", tag="w", size_bytes=1)
        assert caught.value.code == "out_of_memory"


# A device that fails


def ended(service: Process, *words: str) -> None:
    assert service.wait() == 1
    said = service.rest()
    assert "Traceback" not in said, said
    for word in ("memory service for cuda:0 ends: ", *words):
        assert word in said, said


@pytest.mark.parametrize(
    ("function", "number", "words"),
    [
        ("cuMemCreate", 999, "end the process and start it again"),
        ("cuMemCreate", 304, "the operating system refused"),
        ("cuMemExportToShareableHandle", 999, "failed with"),
    ],
)
def test_a_failing_device_ends_the_service_with_the_reason(gpu: Device, function: str, number: int, words: str) -> None:
    with Bench(gpu, fail=f"{function}@2={number}") as bench, bench.connect() as client:
        lease = client.attach("weights/w", LeaseMode.RW)
        lease.allocate("w", UNIT).close()
        with pytest.raises(GmsError, match=rf"{function} failed .* The memory service ends|closed the connection"):
            lease.allocate("x", UNIT)
        ended(bench.service, function, words)
        assert not bench.path.exists()


def test_a_device_that_fails_to_give_memory_back_ends_the_service(gpu: Device) -> None:
    """Nobody asked for it, and nobody is told but by the end."""
    with Bench(gpu, fail="cuMemRelease@1=999") as bench, bench.connect() as client:
        lease = client.attach("weights/w", LeaseMode.RW)
        lease.allocate("w", UNIT).close()
        lease.release(quiesced=True)
        ended(bench.service, "cuMemRelease")


def test_what_a_failed_service_had_goes_to_the_next(gpu: Device) -> None:
    """Its end is as any other: whoever has the pages hands them back."""
    with Bench(gpu, fail="cuMemCreate@2=999") as bench:
        writer = bench.agent("a")
        generation = writer.write_weights("weights/w", "tensors")
        with bench.connect() as client:
            lease = client.attach("weights/w", LeaseMode.RO)
            with lease.export("w") as pages:
                with pytest.raises(GmsError):
                    client.attach("kv", LeaseMode.RW).allocate("pages", UNIT)
                ended(bench.service, "cuMemCreate")
                bench.start()
                with bench.connect() as again:
                    assert bench.pool("weights/w").state == "ADOPTING"  # type: ignore[union-attr]
                    again.adopt("weights/w", generation=generation, mode=LeaseMode.RO, epoch=0, allocations=[pages])
                    reader = bench.agent("b")
                    reader.do("attach", pool="weights/w", mode="rw_or_ro")
                    assert reader.read_weights("weights/w", 7) == "tensors"
                    assert reader.do("verify", pool="weights/w") == UNIT


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_no_room_is_no_failure_and_nothing_of_it_stays(gpu: Device, failing: int) -> None:
    with Bench(gpu, "--chunk-size", str(UNIT), fail=f"cuMemCreate@{failing}=2") as bench, bench.connect() as client:
        lease = client.attach("weights/w", LeaseMode.RW)
        client.status()
        before = bench.service.fds()
        with pytest.raises(GmsError, match="The device has no room for 6291456 bytes as 'w'") as caught:
            lease.allocate("w", 3 * UNIT)
        assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
        assert client.status().total_bytes == 0
        until(lambda: bench.service.fds() == before, "the chunks before it are given back")
        lease.allocate("w", 3 * UNIT).close()
        lease.release(quiesced=True)
        until(lambda: bench.service.fds() == before, "and so are those")


def test_no_room_for_a_moment_is_waited_for(gpu: Device) -> None:
    """Somebody else's memory on the device: its freeing is told to nobody, and found out all the same."""
    with Bench(gpu, fail="cuMemCreate@1=2,cuMemCreate@2=2") as bench, bench.connect() as client:
        lease = client.attach("weights/w", LeaseMode.RW)
        with lease.allocate("w", UNIT, timeout_seconds=30) as pages:
            assert pages.created


def leave_descriptors(service: Process, count: int) -> None:
    """So many that the service could still open."""
    used = {int(name) for name in os.listdir(f"/proc/{service.pid}/fd")}
    free = [number for number in range(len(used) + count + 1) if number not in used]
    _, hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (free[count], hard))


def test_no_client_can_end_the_service_by_taking_its_descriptors(gpu: Device) -> None:
    """The driver needs some too, and says no more than that something failed. Whatever is short, it is told to try
    again, nothing is left of the attempt, and afterwards all goes on."""
    with Bench(gpu, "--chunk-size", str(UNIT)) as bench, bench.connect() as client:
        lease = client.attach("weights/w", LeaseMode.RW)
        lease.allocate("w", UNIT).close()
        client.status()
        open_ = bench.service.fds()
        before = resource.prlimit(bench.service.pid, resource.RLIMIT_NOFILE)
        told = []
        for count in range(40):
            leave_descriptors(bench.service, count)
            try:
                lease.allocate(f"x{count}", 4 * UNIT).close()
                break
            except GmsError as error:
                told.append((error.code, error.retryable))
            until(lambda: bench.service.fds() == open_, "nothing is left of it")
        assert set(told) == {("out_of_memory", True), ("busy", True)}
        assert told[-1] == ("busy", True)  # the chunks were there, but could not be sent
        assert client.status().total_bytes == 5 * UNIT
        resource.prlimit(bench.service.pid, resource.RLIMIT_NOFILE, before)


def test_pages_that_cannot_be_kept_for_the_moment_can_be_handed_back_again(gpu: Device) -> None:
    with Bench(gpu, "--chunk-size", str(UNIT)) as bench, bench.connect() as client:
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        with lease.allocate("pages", 4 * UNIT) as pages:
            bench.service.kill()
            bench.start()
            with bench.connect() as again:
                limits = resource.prlimit(bench.service.pid, resource.RLIMIT_NOFILE)
                told = set()
                for count in range(4, 40):  # four come with the message itself
                    again.status()  # the service is done with the one before, and has closed what came with it
                    leave_descriptors(bench.service, count)
                    try:
                        again.adopt("kv", generation=lease.generation, mode=LeaseMode.RW, epoch=1, allocations=[pages])
                        break
                    except GmsError as error:
                        told.add((error.code, error.retryable))
                assert told
                assert told <= {("out_of_memory", True), ("busy", True)}  # less is missing each time
                assert bench.pool("kv").state == "WRITING"  # type: ignore[union-attr]
                resource.prlimit(bench.service.pid, resource.RLIMIT_NOFILE, limits)


def answers(bench: Bench, until_done: Any) -> list[float]:
    """How long each of many status calls took meanwhile."""
    took = []
    with bench.connect("watcher") as client:
        while not until_done():
            started = time.monotonic()
            client.status()
            took.append(time.monotonic() - started)
    return took


SLOW_MS = 800


def test_a_slow_driver_holds_nobody_else_up(gpu: Device) -> None:
    with Bench(gpu, "--chunk-size", str(UNIT), delay=f"cuMemCreate={SLOW_MS}") as bench:
        slow, quick = bench.agent("slow"), bench.agent("quick")
        slow.do("attach", pool="weights/w", mode="rw")
        started = time.monotonic()
        slow.ask("allocate", pool="weights/w", tag="w", size_bytes=3 * UNIT)
        took = answers(bench, slow.answered)
        assert slow.answer()["created"]
        assert time.monotonic() - started >= 3 * SLOW_MS / 1000
        assert len(took) > 10
        # A busy machine may hold one up once. If they waited for the driver, they would for two of its calls at least.
        assert sum(seconds for seconds in took if seconds >= SLOW_MS / 2000) < 1.5 * SLOW_MS / 1000
        assert quick.do("attach", pool="kv", mode="rw", epoch=1)["fresh"]


def test_a_client_that_dies_while_the_driver_is_slow_leaves_nothing(gpu: Device) -> None:
    with Bench(gpu, "--chunk-size", str(UNIT), delay=f"cuMemCreate={SLOW_MS}") as bench, bench.connect() as client:
        client.status()
        before = bench.service.fds()
        agent = bench.agent("slow")
        agent.do("attach", pool="weights/w", mode="rw")
        agent.ask("allocate", pool="weights/w", tag="w", size_bytes=2 * UNIT)
        until(lambda: client.status().total_bytes == 2 * UNIT, "its memory is being made")
        agent.kill()
        until(lambda: client.status().total_bytes == 0, "it is not counted any more")
        until(lambda: bench.service.fds() == before, "and is given back once it is there")


@pytest.mark.parametrize(
    ("settings", "device", "sentence"),
    [
        ({"fail": "cuInit@1=803"}, "cuda:0", "cuInit failed with"),
        ({"fail": "cuInit@1=999"}, "cuda:0", "cuInit failed with CUDA_ERROR_UNKNOWN (999)"),
        ({"devices": 0}, "cuda:0", "no GPU is visible"),
        ({}, "cuda:7", "there is no GPU of this number"),
        ({"attributes": "102=0"}, "cuda:0", "no virtual memory that can be shared"),
        ({"attributes": "103=0"}, "cuda:0", "no virtual memory that can be shared"),
    ],
    ids=str,
)
def test_a_device_that_cannot_be_used_is_said_at_the_start(
    bench: Bench, spawn: Any, socket_path: Path, settings: dict[str, Any], device: str, sentence: str
) -> None:
    assert bench.gpus is not None
    environment = bench.gpus.environment("other", no_context=1, **settings)
    process = spawn(["-m", "gms", "--socket", str(socket_path), "--device", device], environment, "stderr")
    assert process.wait() == 2
    said = process.rest()
    assert said.startswith(f"gms: The device {device} cannot be used: "), said
    assert sentence in said
    assert said.count("\n") == 1
    assert not socket_path.exists()


def test_a_machine_without_a_driver(spawn: Any, socket_path: Path) -> None:
    try:
        with open("/proc/driver/nvidia/version"):
            pytest.skip("this machine has a driver")
    except FileNotFoundError:
        pass
    process = spawn(["-m", "gms", "--socket", str(socket_path), "--device", "cuda:0"], stream="stderr")
    assert process.wait() == 2
    said = process.rest()
    assert said.startswith("gms: The device cuda:0 cannot be used: The CUDA driver's libcuda.so.1 cannot be loaded (")
    assert said.count("\n") == 1


def test_chunks_that_the_device_cannot_have(bench: Bench, spawn: Any, socket_path: Path) -> None:
    assert bench.gpus is not None
    arguments = ["-m", "gms", "--socket", str(socket_path), "--device", "cuda:0", "--chunk-size", "3MiB"]
    process = spawn(arguments, bench.gpus.environment("other", no_context=1), "stderr")
    assert process.wait() == 2
    assert "chunks must be a multiple of 2097152 bytes, not 3145728" in process.rest()


def test_the_service_makes_no_context_and_maps_nothing(bench: Bench) -> None:
    """Whatever is done with it: so no kernel can kill it, and it costs the GPU nothing."""
    writer, reader = bench.agent("a"), bench.agent("b")
    writer.write_weights("weights/w", "x", size_bytes=3 * UNIT)
    reader.do("attach", pool="weights/w", mode="ro")
    reader.read_weights("weights/w", 1)
    reader.do("verify", pool="weights/w")
    reader.hold_kv(1)
    bench.end_agents()
    bench.service.signal(signal.SIGTERM)
    assert bench.service.wait() == 0
    assert bench.gpus is not None
    calls = {call.split("(")[0] for call in bench.gpus.calls("service")}
    assert not [call for call in calls if "Ctx" in call or "Map" in call or "Reserve" in call or "Memcpy" in call]
    assert {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"} <= calls
