"""How much there is, who has it, and what happens when somebody wants more."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gms.client import GmsError, LeaseMode
from tests.process.gms import bench as benches
from tests.process.gms.bench import Agent, Bench, Device
from tests.process.gms.processes import until
from workers.ports import PortReservation

pytestmark = pytest.mark.process

UNITS = 4
"""What the limit is, in the device's units."""


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    """With a limit of UNITS."""
    with Bench(device, "--memory-limit", str(UNITS * device.unit), "--chunk-size", str(device.unit)) as made:
        yield made


def holder(bench: Bench, engine: str, units: int) -> Agent:
    """A writer that has not committed yet."""
    agent = bench.agent(engine)
    agent.do("attach", pool=f"weights/{engine}", mode="rw")
    agent.do("allocate", pool=f"weights/{engine}", tag="w", size_bytes=units * bench.device.unit)
    return agent


def asker(bench: Bench, engine: str, units: int, *, timeout_seconds: float = 60.0) -> Agent:
    """One that asks for memory and whose answer is still to be heard; it waits if `timeout_seconds`."""
    agent = bench.agent(engine)
    pool, size = f"weights/{engine}", units * bench.device.unit
    agent.do("attach", pool=pool, mode="rw")
    agent.ask("allocate", pool=pool, tag="w", size_bytes=size, timeout_seconds=timeout_seconds)
    if timeout_seconds:  # its wait may be over before it is seen in the status; the event stays
        until(lambda: has_waited(bench, pool), f"{engine} waits")
    return agent


def has_waited(bench: Bench, pool: str) -> bool:
    with bench.connect("status") as client:
        return any(event.kind == "memory_wait" and event.pool == pool for event in client.events().events)


def waits(bench: Bench) -> list[str]:
    with bench.connect("status") as client:
        return client.status().memory_waits


def test_who_waits_is_served_when_another_lets_go(bench: Bench) -> None:
    a = holder(bench, "a", 3)
    b = asker(bench, "b", 2)
    (sentence,) = waits(bench)
    size = 2 * bench.device.unit
    assert re.fullmatch(
        rf"engine b \(pid {b.pid}\) waits for {size} bytes as 'w' in weights/b, for \d+\.\d s", sentence
    )
    with bench.connect() as client:
        (event,) = [event for event in client.events().events if event.kind == "memory_wait"]
        assert event.client == f"engine b (pid {b.pid})"
        assert f"{3 * bench.device.unit} by weights/a of engine a (pid {a.pid})" in event.detail
    a.do("release", pool="weights/a", quiesced=True)
    assert b.answer()["created"]
    assert waits(bench) == []


def test_who_waits_is_served_when_another_dies(bench: Bench) -> None:
    a = holder(bench, "a", 3)
    b = asker(bench, "b", 4)
    a.kill()
    assert b.answer()["created"]


def test_who_waits_in_vain_is_told_who_has_it(bench: Bench) -> None:
    a = holder(bench, "a", 3)
    started = time.monotonic()
    b = asker(bench, "b", 2, timeout_seconds=0.3)
    with pytest.raises(GmsError) as caught:
        b.answer()
    assert 0.3 <= time.monotonic() - started < 5
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", False)  # a lives, and keeps it
    assert f"held are {3 * bench.device.unit} by weights/a of engine a (pid {a.pid})" in str(caught.value)
    assert waits(bench) == []
    with bench.connect() as client:
        assert client.status().total_bytes == 3 * bench.device.unit
    assert b.do("allocate", pool="weights/b", tag="w", size_bytes=bench.device.unit)["created"]


def test_who_does_not_want_to_wait_is_refused_at_once(bench: Bench) -> None:
    holder(bench, "a", 4)
    b = asker(bench, "b", 1, timeout_seconds=0)
    with pytest.raises(GmsError, match=r"Raise --memory-limit \(of a pod: .*\), or end one of them") as caught:
        b.answer()
    assert caught.value.code == "out_of_memory"


def test_more_than_there_can_ever_be_is_not_waited_for(bench: Bench) -> None:
    with bench.connect() as client:
        lease = client.attach("weights/a", LeaseMode.RW)
        with pytest.raises(GmsError) as caught:
            lease.allocate("w", (UNITS + 1) * bench.device.unit, timeout_seconds=60)
        assert (caught.value.code, caught.value.retryable) == ("out_of_memory", False)
        assert client.status().total_bytes == 0


def test_those_who_wait_are_served_in_their_order(bench: Bench) -> None:
    """One who needs much is not overtaken by others who wait; who does not wait may take what is left."""
    a = holder(bench, "a", 3)
    large, small = asker(bench, "large", 3), asker(bench, "small", 1)
    assert [sentence.split(" (")[0] for sentence in waits(bench)] == ["engine large", "engine small"]
    with bench.connect() as client:
        lease = client.attach("weights/now", LeaseMode.RW)
        lease.allocate("w", bench.device.unit).close()
        lease.release(quiesced=True)
    a.kill()
    assert large.answer()["created"]
    assert small.answer()["created"]


def test_a_dead_waiter_is_not_waited_for(bench: Bench) -> None:
    holder(bench, "a", 3)
    large, small = asker(bench, "large", 2), asker(bench, "small", 1)
    large.kill()
    assert small.answer()["created"]
    assert waits(bench) == []


def test_who_waits_for_memory_and_loses_the_pool_stops_waiting(bench: Bench) -> None:
    holder(bench, "a", 4)
    old = bench.agent("old")
    old.do("attach", pool="kv", mode="rw", epoch=1)
    old.ask("allocate", pool="kv", tag="pages", size_bytes=bench.device.unit, timeout_seconds=60)
    until(lambda: len(waits(bench)) == 1, "it waits")
    with bench.connect("new") as client:
        client.attach("kv", LeaseMode.RW, epoch=2, timeout_seconds=0.01)
        with pytest.raises(GmsError, match="must stop serving") as caught:
            old.answer()
        assert caught.value.code == "fenced"
        assert client.status().total_bytes == UNITS * bench.device.unit


def test_what_nobody_uses_is_given_up_before_anyone_is_refused(bench: Bench) -> None:
    oldest, used, newest = (bench.agent(name) for name in ("oldest", "used", "newest"))
    for agent, name in ((oldest, "oldest"), (used, "used"), (newest, "newest")):
        agent.write_weights(f"weights/{name}", name)
    for agent in (oldest, newest):
        agent.kill()
    for name in ("oldest", "newest"):
        bench.until_pool(f"weights/{name}", lambda pool: pool.state == "COMMITTED")
    kv = bench.agent("kv")
    kv.hold_kv(1, size_bytes=2 * bench.device.unit)
    assert bench.pool("weights/oldest") is None
    assert bench.pool("weights/newest").state == "COMMITTED"  # type: ignore[union-attr]
    with bench.connect() as client:
        (event,) = [event for event in client.events().events if event.kind == "evicted"]
        assert (event.pool, "nobody uses it and memory is short" in event.detail) == ("weights/oldest", True)
        lease = client.attach("weights/more", LeaseMode.RW)
        lease.allocate("w", bench.device.unit).close()
        assert bench.pool("weights/newest") is None
        with pytest.raises(GmsError) as caught:  # what is used, and what the next epoch may need, is not given up
            lease.allocate("x", bench.device.unit)
        assert caught.value.code == "out_of_memory"
    kv.kill()
    bench.until_pool("kv", lambda pool: pool.state == "COMMITTED")
    assert used.read_weights("weights/used", 4) == "used"


def test_what_nobody_uses_is_not_given_up_in_vain(bench: Bench) -> None:
    unused = bench.agent("unused")
    unused.write_weights("weights/unused", "unused")
    unused.kill()
    bench.until_pool("weights/unused", lambda pool: pool.state == "COMMITTED")
    holder(bench, "a", 2)
    for engine, seconds in (("b", 0), ("c", 0.6)):  # in which one who waits has been tried again more than once
        with pytest.raises(GmsError, match=r"Raise --memory-limit \(of a pod: .*\), or end one of them") as caught:
            asker(bench, engine, 3, timeout_seconds=seconds).answer()
        assert (caught.value.code, caught.value.retryable) == ("out_of_memory", False)
    assert bench.agent("reader").do("attach", pool="weights/unused", mode="ro")["mode"] == "ro"
    bench.end_agents()
    bench.until_pool("weights/unused", lambda pool: pool.state == "COMMITTED")
    holder(bench, "d", 4)
    assert bench.pool("weights/unused") is None


def test_a_takeover_without_proof_gets_its_pages_once_the_old_holder_is_gone(bench: Bench) -> None:
    """There is room for the weights and one set of KV pages, and a little: the new holder is told to try again, since
    the orphan goes with its holder."""
    unit = bench.device.unit
    old, new = bench.agent("old"), bench.agent("new")
    new.write_weights("weights/w", "weights")
    old.hold_kv(1, size_bytes=2 * unit)
    old.process.signal(signal.SIGSTOP)  # it answers nobody, and is not dead
    lease = new.do("attach", pool="kv", mode="rw", epoch=2, timeout_seconds=0.05)
    assert lease["fresh"]
    with pytest.raises(GmsError, match="will go by itself: try again") as caught:
        new.do("allocate", pool="kv", tag="pages", size_bytes=2 * unit)
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
    with pytest.raises(GmsError) as caught:  # more than fits beside the weights will not do then either
        new.do("allocate", pool="kv", tag="pages", size_bytes=4 * unit)
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", False)
    new.ask("allocate", pool="kv", tag="pages", size_bytes=2 * unit, timeout_seconds=60)
    until(lambda: len(waits(bench)) == 1, "it waits")
    old.kill()
    assert new.answer()["created"]
    with bench.connect() as client:
        assert client.status().total_bytes == 3 * unit


def test_no_more_chunks_than_the_service_can_open_files_for(device: Device) -> None:
    """And with all of them in use clients still come and are served."""
    files = 256

    def few(arguments: list[str]) -> list[str]:
        code = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)"
        return ["-c", f"{code}; os.execv(sys.executable, [sys.executable, *sys.argv[2:]])", str(files), *arguments]

    unit = device.unit
    with Bench(device, "--chunk-size", str(unit), wrap=few) as bench, bench.connect() as client:
        lease = client.attach("weights/a", LeaseMode.RW)
        with pytest.raises(GmsError, match=r"the most is \d+, since this service may not open more files") as caught:
            lease.allocate("all", files * unit)
        assert (caught.value.code, "ulimit -n" in str(caught.value)) == ("too_many", True)
        most = int(re.findall(r"the most is (\d+)", str(caught.value))[0])
        assert files // 4 <= most <= files // 2
        lease.allocate("w", most * unit).close()
        with bench.connect("b") as other:
            assert other.status().total_bytes == most * unit
            with pytest.raises(GmsError, match=f"{most} chunks of memory stand already"):
                other.attach("kv", LeaseMode.RW).allocate("pages", unit)


def test_status_and_metrics_tell_it(device: Device) -> None:
    limit = UNITS * device.unit
    with (
        PortReservation() as free,
        Bench(device, "--memory-limit", str(limit), "--metrics-port", str(free.port)) as bench,
    ):
        a = holder(bench, "a", 3)
        a.do("release", pool="weights/a", quiesced=True)
        b = bench.agent("b")
        b.hold_kv(1, size_bytes=2 * device.unit)
        c = asker(bench, "c", 3)
        with bench.connect() as client:
            status = client.status()
        (kv,) = [pool for pool in status.pools if pool.name == "kv"]
        assert (status.total_bytes, status.high_water_bytes) == (2 * device.unit, 3 * device.unit)
        assert (kv.bytes, kv.high_water_bytes, status.memory_limit) == (2 * device.unit, 2 * device.unit, limit)
        assert status.bytes_by_owner == {f"engine b (pid {b.pid})": 2 * device.unit}
        with urllib.request.urlopen(f"http://127.0.0.1:{free.port}/metrics", timeout=10) as answer:
            found = metrics(answer.read().decode())
        assert {name: found[name] for name in EXPECTED} == {
            name: value * device.unit if name in IN_UNITS else value for name, value in EXPECTED.items()
        }
        c.kill()


EXPECTED = {
    'hotspare_gms_pool_bytes{pool="kv"}': 2,
    'hotspare_gms_pool_high_water_bytes{pool="kv"}': 2,
    'hotspare_gms_owner_bytes{owner="engine b"}': 2,
    "hotspare_gms_high_water_bytes": 3,
    "hotspare_gms_memory_limit_bytes": 4,
    "hotspare_gms_memory_waiting": 1,
    'hotspare_gms_leases{mode="rw",pool="kv"}': 1,
    'hotspare_gms_pool_state{pool="kv",state="WRITING"}': 1,
    "hotspare_gms_journal_ok": 1,
}
IN_UNITS = {name for name in EXPECTED if "_bytes" in name}


def metrics(text: str) -> dict[str, float]:
    """By name, with the labels in their order of the alphabet."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            inside = ",".join(sorted(labels.split(","))) if labels else ""
            found[f"{name}{{{inside}}}" if inside else name] = float(value)
    return found


def test_a_device_that_is_full_leaves_nothing_half_allocated(gpu: Device) -> None:
    """No limit of ours: the driver says no, at the last chunk of several. How the host does, see cgroups below."""
    unit = gpu.unit
    with Bench(gpu, "--chunk-size", str(unit), memory_bytes=4 * unit) as bench:
        with bench.connect() as client:
            lease = client.attach("weights/a", LeaseMode.RW)
            lease.allocate("small", unit).close()
            client.status()
            before = bench.service.fds()
            with pytest.raises(GmsError, match="The device has no room") as caught:
                lease.allocate("large", 4 * unit)
            assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
            assert client.status().total_bytes == unit
            until(lambda: bench.service.fds() == before, "its chunks are given back")
            lease.allocate("large", 3 * unit).close()
            b = bench.agent("b")
            b.do("attach", pool="weights/b", mode="rw")
            b.ask("allocate", pool="weights/b", tag="w", size_bytes=unit, timeout_seconds=60)
            until(lambda: len(waits(bench)) == 1, "it waits")
            lease.release(quiesced=True)
        assert b.answer()["created"]


@pytest.mark.parametrize("size_bytes", [1 << 40, 1 << 48])
def test_a_size_that_no_machine_has(device: Device, size_bytes: int) -> None:
    """Refused before anything is touched."""
    with Bench(device, memory_bytes=64 << 20) as bench, bench.connect() as client:
        lease = client.attach("weights/a", LeaseMode.RW)
        started = time.monotonic()
        with pytest.raises(GmsError) as caught:
            lease.allocate("huge", size_bytes)
        assert caught.value.code in ("out_of_memory", "too_many")
        assert time.monotonic() - started < 5
        assert client.status().total_bytes == 0


# Whose memory it is for the kernel: on the host alone


class Group:
    """A memory cgroup of this machine."""

    def __init__(self, name: str) -> None:
        first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        if (first / "memory.limit_in_bytes").exists():
            self._root, self._usage, self._limit = first, "memory.usage_in_bytes", "memory.limit_in_bytes"
        elif "memory" in (second / "cgroup.subtree_control").read_text().split():
            self._root, self._usage, self._limit = second, "memory.current", "memory.max"
        else:
            raise OSError("no memory controller is mounted")
        self.path = self._root / name
        self.path.mkdir()

    @property
    def usage(self) -> int:
        return int((self.path / self._usage).read_text())

    @property
    def kills(self) -> int:
        """How often the kernel chose a victim in it."""
        file = "memory.oom_control" if self._root.name == "memory" else "memory.events"
        (line,) = [line for line in (self.path / file).read_text().splitlines() if line.startswith("oom_kill ")]
        return int(line.split()[1])

    def limit(self, size_bytes: int) -> None:
        (self.path / self._limit).write_text(str(size_bytes))

    def inside(self, arguments: list[str]) -> list[str]:
        code = f"open({str(self.path / 'cgroup.procs')!r}, 'w').write('0')"
        return ["-c", f"import os, sys; {code}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *arguments]

    def close(self) -> None:
        def removed() -> bool:
            try:
                self.path.rmdir()
            except OSError:  # the last of its processes is not quite gone
                return False
            return True

        until(removed, f"{self.path} is removed")


@pytest.fixture
def groups() -> Iterator[tuple[Group, Group]]:
    """The service's and the client's."""
    with ExitStack() as stack:
        made = []
        try:
            for name in ("service", "client"):
                made.append(Group(f"gms-test-{os.getpid()}-{name}"))
                stack.callback(made[-1].close)
        except OSError as error:
            pytest.skip(f"cgroups for memory cannot be made here: {error}")
        yield made[0], made[1]


@pytest.fixture
def contained(groups: tuple[Group, Group]) -> Iterator[Bench]:
    with Bench(benches.host(), wrap=groups[0].inside) as bench:
        yield bench


SIZE = 64 << 20


def test_pages_are_charged_to_the_service_and_not_to_who_uses_them(
    groups: tuple[Group, Group], contained: Bench
) -> None:
    service, client = groups
    agent = contained.agent("a", wrap=client.inside)
    before = service.usage, client.usage
    agent.do("attach", pool="kv", mode="rw", epoch=1)
    agent.do("allocate", pool="kv", tag="pages", size_bytes=SIZE)
    assert service.usage - before[0] >= SIZE
    agent.do("map", pool="kv", tag="pages", writable=True)
    for offset in range(0, SIZE, 1 << 20):
        agent.do("write", pool="kv", tag="pages", offset=offset, text="x" * (1 << 20))
    assert client.usage - before[1] < SIZE // 4
    agent.kill()
    next_ = contained.agent("b", wrap=client.inside)
    lease, created = next_.hold_kv(2, size_bytes=SIZE)
    assert (lease["fresh"], created) == (False, False)
    next_.do("read", pool="kv", tag="pages", offset=0, length=1 << 20)
    assert client.usage - before[1] < SIZE // 4


def fill(agent: Agent, step: int) -> int:
    """Allocates until there is no more; returns how much it got."""
    granted = 0
    try:
        while True:
            agent.do("allocate", pool="weights/a", tag=f"w{granted}", size_bytes=step)
            granted += step
    except GmsError as error:
        if error.code != "out_of_memory":
            raise
    return granted


def test_the_limit_of_a_cgroup_is_an_error_and_kills_nobody(groups: tuple[Group, Group], contained: Bench) -> None:
    service, client = groups
    agent = contained.agent("a", wrap=client.inside)
    agent.do("attach", pool="weights/a", mode="rw")
    service.limit(service.usage + SIZE)
    with pytest.raises(GmsError, match="this container has") as caught:
        agent.do("allocate", pool="weights/a", tag="large", size_bytes=2 * SIZE)
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
    granted = fill(agent, 1 << 20)
    assert SIZE // 2 <= granted < SIZE
    with contained.connect() as connection:
        assert connection.status().total_bytes == granted
    other = contained.agent("b", wrap=client.inside)
    other.do("attach", pool="weights/b", mode="rw")
    other.ask("allocate", pool="weights/b", tag="w", size_bytes=SIZE // 2, timeout_seconds=60)
    until(lambda: len(waits(contained)) == 1, "it waits")
    agent.kill()  # a release would not do: whoever keeps a descriptor keeps the memory
    assert other.answer()["created"]
    assert service.kills == client.kills == 0


def test_two_that_ask_at_once_do_not_get_what_is_there_for_one(groups: tuple[Group, Group], contained: Bench) -> None:
    """Pages are filled in turns: what is promised to one is not there for the other, though it is not taken yet."""
    service, _ = groups
    agents = [contained.agent("a"), contained.agent("b")]
    service.limit(service.usage + 4 * SIZE)
    for agent in agents:
        agent.do("attach", pool=f"weights/{agent.pid}", mode="rw")
    for agent in agents:
        agent.ask("allocate", pool=f"weights/{agent.pid}", tag="w", size_bytes=3 * SIZE)
    assert sorted(outcome(agent) for agent in agents) == ["granted", "out_of_memory"]
    assert service.kills == 0
    assert contained.service.process.poll() is None


@pytest.mark.parametrize(
    ("below", "allowed"),
    [
        (0, {"out_of_memory"}),
        (1 << 16, {"out_of_memory"}),
        (1 << 20, {"out_of_memory"}),
        (9 << 20, {"granted", "out_of_memory"}),
        (12 << 20, {"granted"}),
    ],
)
def test_filling_to_the_edge_kills_nobody(
    groups: tuple[Group, Group], contained: Bench, below: int, allowed: set[str]
) -> None:
    """Pages cost a little more than their size: what just fits may be refused, and the service is there afterwards."""
    service, _ = groups
    agent = contained.agent("a")
    agent.do("attach", pool="weights/a", mode="rw")
    service.limit(service.usage + SIZE)
    size = SIZE - below
    agent.ask("allocate", pool="weights/a", tag="w", size_bytes=size)
    found = outcome(agent)
    assert found in allowed
    with contained.connect() as client:
        assert client.status().total_bytes == (size if found == "granted" else 0)
    assert service.kills == 0
    assert contained.service.process.poll() is None


def outcome(agent: Agent) -> str:
    try:
        agent.answer()
    except GmsError as error:
        return error.code
    return "granted"
