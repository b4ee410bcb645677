"""One writer, many readers, and what a SIGKILL in between does, on host memory and on a GPU."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from gms.protocol import MAX_FDS
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def shared(device: Device) -> Iterator[Bench]:
    """One service for all; whatever is larger than a page or a GPU's granule is in several chunks."""
    with Bench(device, "--chunk-size", str(device.unit)) as bench:
        yield bench


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    yield shared
    shared.end_agents()


_NAMES = itertools.count()


@pytest.fixture
def pool() -> str:
    """Everyone's own."""
    return f"weights/{next(_NAMES)}"


def test_the_first_writes_and_the_next_reads_what_it_wrote(bench: Bench, pool: str) -> None:
    writer, reader = bench.agent("a"), bench.agent("b")
    assert writer.do("attach", pool=pool, mode="rw_or_ro")["mode"] == "rw"
    pages = writer.do("allocate", pool=pool, tag="w", size_bytes=3 * bench.device.unit - 1)
    assert pages == {"size_bytes": 3 * bench.device.unit, "chunks": 3, "created": True}
    writer.do("map", pool=pool, tag="w", writable=True)
    seam = 2 * bench.device.unit - 2
    writer.do("write", pool=pool, tag="w", offset=seam, text="over two chunks")
    reader.ask("attach", pool=pool, mode="rw_or_ro")
    bench.until_pool(pool, lambda found: found.waiting == 1)
    generation = writer.do("commit", pool=pool, manifest="manifest")["generation"]
    assert reader.answer() == {
        "mode": "ro",
        "generation": generation,
        "fresh": False,
        "manifest": "manifest",
        "tags": ["w"],
    }
    assert reader.read_weights(pool, 15, offset=seam) == "over two chunks"
    with pytest.raises(GmsError, match="mapped read-only"):
        reader.do("write", pool=pool, tag="w", offset=0, text="x")
    found = bench.pool(pool)
    assert found is not None
    assert (found.state, found.bytes, len(found.leases)) == ("READ", 3 * bench.device.unit, 2)


def test_more_chunks_than_go_into_one_message(bench: Bench, pool: str) -> None:
    count = MAX_FDS + 3
    writer = bench.agent("a")
    writer.do("attach", pool=pool, mode="rw")
    pages = writer.do("allocate", pool=pool, tag="w", size_bytes=count * bench.device.unit)
    assert (pages["chunks"], pages["created"]) == (count, True)
    writer.do("map", pool=pool, tag="w", writable=True)
    for number in range(count):
        writer.do("write", pool=pool, tag="w", offset=number * bench.device.unit, text=f"chunk {number:3}")
    writer.do("commit", pool=pool)
    reader = bench.agent("b")
    reader.do("attach", pool=pool, mode="ro")
    reader.read_weights(pool, 9)
    for number in range(count):
        found = reader.do("read", pool=pool, tag="w", offset=number * bench.device.unit, length=9)
        assert found == f"chunk {number:3}"
    assert reader.do("verify", pool=pool) == count * bench.device.unit


def test_several_allocations_in_one_pool(bench: Bench, pool: str) -> None:
    writer = bench.agent("a")
    writer.do("attach", pool=pool, mode="rw")
    for tag in ("x", "y"):
        writer.do("allocate", pool=pool, tag=tag, size_bytes=1)
        writer.do("map", pool=pool, tag=tag, writable=True)
        writer.do("write", pool=pool, tag=tag, offset=0, text=f"this is {tag}")
    writer.do("commit", pool=pool)
    reader = bench.agent("b")
    assert reader.do("attach", pool=pool, mode="ro")["tags"] == ["x", "y"]
    assert [reader.read_weights(pool, 9, tag=tag) for tag in ("x", "y")] == ["this is x", "this is y"]


def test_committed_pages_survive_their_writer(bench: Bench, pool: str) -> None:
    writer, reader = bench.agent("a"), bench.agent("b")
    writer.write_weights(pool, "hello")
    writer.kill()
    assert reader.do("attach", pool=pool, mode="rw_or_ro", timeout_seconds=0)["mode"] == "ro"
    assert reader.read_weights(pool, 5) == "hello"


def test_a_writer_killed_before_its_commit_leaves_nothing_and_the_next_writes(bench: Bench, pool: str) -> None:
    writer, heir = bench.agent("a"), bench.agent("b")
    with bench.connect() as client:
        before = client.status().total_bytes
        writer.do("attach", pool=pool, mode="rw_or_ro")
        writer.do("allocate", pool=pool, tag="w", size_bytes=1)
        writer.do("map", pool=pool, tag="w", writable=True)
        assert client.status().total_bytes == before + bench.device.unit
        heir.ask("attach", pool=pool, mode="rw_or_ro")
        bench.until_pool(pool, lambda found: found.waiting == 1)
        writer.kill()
        lease = heir.answer()
        assert (lease["mode"], lease["fresh"], lease["tags"]) == ("rw", True, [])
        until(lambda: client.status().total_bytes == before, "the dead writer's pages are given back")


def test_pages_of_a_writer_that_only_hung_up_stay_until_it_is_dead(bench: Bench, pool: str) -> None:
    """It may still have them mapped."""
    writer = bench.agent("a")
    writer.do("attach", pool=pool, mode="rw")
    writer.do("allocate", pool=pool, tag="w", size_bytes=1)
    writer.do("map", pool=pool, tag="w", writable=True)
    writer.do("disconnect")
    bench.until_pool(pool, lambda found: found.orphaned_bytes == bench.device.unit)
    heir = bench.agent("b")
    assert heir.do("attach", pool=pool, mode="rw_or_ro")["mode"] == "rw"
    writer.kill()
    bench.until_pool(pool, lambda found: found.orphaned_bytes == 0)


@pytest.mark.parametrize("writable", [True, False])
def test_a_commit_with_a_mapping_left(bench: Bench, pool: str, writable: bool) -> None:
    """Where pages are sealed even a read-only mapping of a writable descriptor counts: mprotect would open it."""
    writer = bench.agent("a")
    writer.do("attach", pool=pool, mode="rw")
    writer.do("allocate", pool=pool, tag="w", size_bytes=1)
    writer.do("map", pool=pool, tag="w", writable=writable)
    if bench.device.sealed:
        with pytest.raises(GmsError, match="'w' still has a writable mapping") as caught:
            writer.do("commit", pool=pool, keep=True)
        assert (caught.value.code, caught.value.retryable) == ("still_mapped", True)
        assert bench.pool(pool).state == "WRITING"  # type: ignore[union-attr]
        assert writer.do("commit", pool=pool)["mode"] == "ro"
    else:
        assert writer.do("commit", pool=pool, keep=True)["mode"] == "ro"


def test_a_new_generation_is_staged_beside_its_readers(bench: Bench, pool: str) -> None:
    first, second, reader = bench.agent("a"), bench.agent("b"), bench.agent("c")
    old = first.write_weights(pool, "one", manifest="first")
    assert first.read_weights(pool, 3) == "one"
    second.do("attach", pool=pool, mode="rw", timeout_seconds=0)
    second.do("allocate", pool=pool, tag="w", size_bytes=2 * bench.device.unit)
    second.do("map", pool=pool, tag="w", writable=True)
    second.do("write", pool=pool, tag="w", offset=0, text="two")
    assert reader.do("attach", pool=pool, mode="ro")["generation"] == old
    new = second.do("commit", pool=pool, manifest="second")["generation"]
    assert reader.read_weights(pool, 3) == "one"
    assert second.read_weights(pool, 3) == "two"
    assert bench.pool(pool).bytes == 3 * bench.device.unit  # type: ignore[union-attr]
    first.do("release", pool=pool)
    again = first.do("attach", pool=pool, mode="rw_or_ro")
    assert (again["generation"], again["manifest"]) == (new, "second")
    reader.kill()
    bench.until_pool(pool, lambda found: found.bytes == 2 * bench.device.unit)


def test_an_aborted_replacement_leaves_what_is_committed_alone(bench: Bench, pool: str) -> None:
    first, second = bench.agent("a"), bench.agent("b")
    generation = first.write_weights(pool, "one")
    second.do("attach", pool=pool, mode="rw")
    second.do("allocate", pool=pool, tag="w", size_bytes=1)
    second.do("map", pool=pool, tag="w", writable=True)
    second.do("write", pool=pool, tag="w", offset=0, text="two")
    second.kill()
    bench.until_pool(pool, lambda found: (found.state, found.bytes) == ("READ", bench.device.unit))
    third = bench.agent("c")
    assert third.do("attach", pool=pool, mode="rw_or_ro")["generation"] == generation
    assert third.read_weights(pool, 3) == "one"


def test_writers_come_in_order_and_readers_do_not_starve_behind_them(bench: Bench, pool: str) -> None:
    first, second, reader = bench.agent("a"), bench.agent("b"), bench.agent("c")
    first.write_weights(pool, "one")
    first.do("release", pool=pool)
    first.do("attach", pool=pool, mode="rw")
    second.ask("attach", pool=pool, mode="rw")
    bench.until_pool(pool, lambda found: found.waiting == 1)
    reader.do("attach", pool=pool, mode="ro", timeout_seconds=0)
    assert reader.read_weights(pool, 3) == "one"
    waiting = bench.pool(pool)
    assert waiting is not None
    assert waiting.waits[0].startswith(
        f"engine b (pid {second.pid}) waits for {pool} as rw, because another client is still writing it "
        f"(engine a (pid {first.pid}))"
    )
    first.do("commit", pool=pool)
    assert second.answer()["mode"] == "rw"


def test_waiting_ends_with_its_timeout(bench: Bench, pool: str) -> None:
    with bench.connect() as client:
        with pytest.raises(GmsError, match="nobody has committed") as caught:
            client.attach(pool, LeaseMode.RO, timeout_seconds=0.01)
        assert (caught.value.code, caught.value.retryable) == ("timeout", True)
        assert pool not in [found.name for found in client.status().pools]


def test_a_killed_waiter_leaves_the_queue(bench: Bench, pool: str) -> None:
    with bench.connect() as client:
        lease = client.attach(pool, LeaseMode.RW)
        waiter = bench.agent("b")
        waiter.ask("attach", pool=pool, mode="rw")
        bench.until_pool(pool, lambda found: found.waiting == 1)
        waiter.kill()
        bench.until_pool(pool, lambda found: found.waiting == 0)
        lease.release(quiesced=True)
        assert bench.pool(pool) is None


def test_a_stopped_writer_is_waited_for_and_then_killed(bench: Bench, pool: str) -> None:
    writer = bench.agent("a")
    writer.do("attach", pool=pool, mode="rw")
    writer.do("allocate", pool=pool, tag="w", size_bytes=1)
    writer.process.signal(signal.SIGSTOP)
    with bench.connect() as client:
        with pytest.raises(GmsError, match="still writing"):
            client.attach(pool, LeaseMode.RW_OR_RO, timeout_seconds=0.01)
        writer.kill()
        assert client.attach(pool, LeaseMode.RW_OR_RO).mode is LeaseMode.RW


def test_a_manifest_can_be_had_without_a_lease(bench: Bench, pool: str) -> None:
    with bench.connect() as client:
        nothing = client.get_manifest(pool)
        assert (nothing.generation, nothing.manifest, nothing.allocations) == (0, b"", [])
        generation = bench.agent().write_weights(pool, "x", manifest="about tensors")
        found = client.get_manifest(pool)
        assert (found.generation, found.manifest) == (generation, b"about tensors")
        assert [(info.tag, info.size_bytes, info.chunk_bytes) for info in found.allocations] == [
            ("w", bench.device.unit, bench.device.unit)
        ]
        lease = client.attach(pool, LeaseMode.RO)
        with pytest.raises(GmsError, match="commit it instead") as caught:
            lease.put_manifest(b"another")
        assert caught.value.code == "not_permitted"


def test_events_tell_the_story_and_can_be_waited_for(bench: Bench, pool: str) -> None:
    with bench.connect("watcher") as client:
        last = client.events().last
        writer, reader = bench.agent("a"), bench.agent("b")
        writer.do("attach", pool=pool, mode="rw")
        reader.ask("attach", pool=pool, mode="ro")
        bench.until_pool(pool, lambda found: found.waiting == 1)
        writer.do("commit", pool=pool)
        reader.answer()
        happened = [event for event in client.events(last).events if event.pool == pool]
        assert [event.kind for event in happened] == ["granted", "waiting", "committed", "granted"]
        assert [event.client.split(" (")[0] for event in happened] == ["engine a", "engine b", "engine a", "engine b"]
        assert "nobody has committed anything" not in happened[1].detail
        assert "another client is still writing it" in happened[1].detail
        last = client.events(last).last
        assert client.events(last, timeout_seconds=0).events == []
        third = bench.agent("c")
        third.ask("attach", pool=pool, mode="ro")
        (event,) = client.events(last, timeout_seconds=10).events
        assert (event.kind, event.pool, event.seq) == ("granted", pool, last + 1)
        third.answer()


def test_verify(bench: Bench, pool: str) -> None:
    writer, reader = bench.agent("a"), bench.agent("b")
    writer.write_weights(pool, "x")
    reader.do("attach", pool=pool, mode="ro")
    reader.read_weights(pool, 1)
    assert reader.do("verify", pool=pool) == bench.device.unit
    if bench.device.hashed:
        assert bench.agent("c").do("attach", pool=pool, mode="ro", verify=True)["mode"] == "ro"
    else:
        with pytest.raises(GmsError, match="must send its 1 digests of 'w', 0 came") as caught:
            reader.do("verify", pool=pool, bare=True)
        assert caught.value.code == "invalid"
        with pytest.raises(GmsError, match="hash the mapped pages") as caught:
            bench.agent("c").do("attach", pool=pool, mode="ro", verify=True)
        assert caught.value.code == "not_permitted"
        found = bench.pool(pool)
        assert found is not None
        assert len(found.leases) == 2  # c has none
    with bench.connect() as client:  # nothing is committed there, and who does not read has nothing to say of a GPU
        lease = client.attach("weights/empty", LeaseMode.RW)
        refused(lease.verify, "not_found" if bench.device.hashed else "not_attached")


def test_a_commit_without_the_writers_digests(bench: Bench, pool: str) -> None:
    """Where the service cannot hash, a writer that does not either could not be told from one that wrote nonsense."""
    with bench.connect() as client:
        lease = client.attach(pool, LeaseMode.RW)
        lease.allocate("w", 1).close()
        if bench.device.hashed:
            lease.commit(b"")
        else:
            with pytest.raises(GmsError, match="the writer must hash what it wrote") as caught:
                lease.commit(b"")
            assert caught.value.code == "invalid"
        assert bench.pool(pool).state == ("READ" if bench.device.hashed else "WRITING")  # type: ignore[union-attr]


def test_what_a_lease_does_not_allow(bench: Bench, pool: str) -> None:
    with bench.connect() as client:
        unit = bench.device.unit
        lease = client.attach(pool, LeaseMode.RW)
        lease.allocate("w", unit).close()
        refused(lambda: lease.allocate("w", unit), "exists")
        refused(lambda: lease.allocate("w", 2 * unit), "size_mismatch")
        refused(lambda: lease.allocate("t" * 129, unit), "invalid")
        refused(lambda: lease.allocate("x", 0), "invalid")
        refused(lambda: lease.allocate("x", 1 << 60), "invalid")
        refused(lambda: lease.export("other"), "not_found")
        refused(lambda: lease.commit(bytes(3 << 20)), "invalid")
        refused(lambda: lease.commit(bytes(5 << 20)), "bad_message")
        refused(lambda: client.attach(pool, LeaseMode.RO), "already_attached")
        refused(lambda: client.attach("nonsense", LeaseMode.RO), "invalid")
        refused(lambda: client.attach("weights/../x", LeaseMode.RO), "invalid")
        lease.release(quiesced=True)
        refused(lambda: lease.export("w"), "not_attached")
        bench.agent().write_weights(pool, "x")
        lease = client.attach(pool, LeaseMode.RO)
        refused(lambda: lease.allocate("x", unit), "not_permitted")
        refused(lambda: lease.commit(b""), "not_permitted")


def refused(call: Callable[[], object], code: str) -> None:
    with pytest.raises(GmsError) as caught:
        call()
    assert caught.value.code == code


def test_the_client_of_another_device_is_refused(bench: Bench) -> None:
    other = "cuda:0" if bench.device.name == "cpu:0" else "cpu:0"
    with pytest.raises(GmsError, match=rf"wants {other} .* this service has {bench.device.name}") as caught:
        GmsClient.connect(bench.path, engine="x", instance="test", device=other, device_id=f"id-of-{other}")
    assert (caught.value.code, caught.value.retryable) == ("wrong_device", False)
