"""The KV pages go from epoch to epoch, and never to two, on host memory and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from tests.process.gms.bench import Agent, Bench
from tests.process.gms.processes import until

pytestmark = pytest.mark.process


def holder(bench: Bench, epoch: int = 1, *, units: int = 1, pids: tuple[int, ...] = ()) -> Agent:
    """Has written "hello" into the pages."""
    agent = bench.agent("a", pids=pids)
    lease, created = agent.hold_kv(epoch, size_bytes=units * bench.device.unit)
    assert (lease["fresh"], created) == (True, True)
    agent.write_kv("hello")
    return agent


def assert_fresh(bench: Bench, agent: Agent) -> None:
    """Nothing of the old pages, and where the device promises it, nothing at all."""
    found = agent.kv(5)
    assert found != "hello"
    if bench.device.zeroed:
        assert found == "\0" * 5


def test_after_a_kill_the_next_epoch_has_the_same_pages(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    with bench.connect() as client:
        before = client.status()
        old.kill()
        lease, created = new.hold_kv(2)
        assert (lease["fresh"], lease["tags"], created) == (False, ["pages"], False)
        assert new.kv(5) == "hello"
        after = client.status()
    assert (after.total_bytes, after.pools[0].generation) == (before.total_bytes, before.pools[0].generation)
    assert after.bytes_by_owner == {f"engine b (pid {new.pid})": bench.device.unit}


def test_the_next_epoch_waits_for_the_death_and_says_so(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    new.ask("attach", pool="kv", mode="rw", epoch=2)
    waiting = bench.until_pool("kv", lambda pool: pool.waiting == 1)
    assert waiting.leases[0].engine == "a"
    assert waiting.waits[0].startswith(
        f"engine b (pid {new.pid}), epoch 2, waits for kv as rw, because nothing proves yet that its last holder is "
        f"gone (engine a (pid {old.pid})); "
    )
    old.kill()
    assert new.answer()["fresh"] is False


def test_a_closed_connection_is_no_proof(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    old.do("disconnect")
    lease, created = new.hold_kv(2, timeout_seconds=0.02)
    assert (lease["fresh"], lease["tags"], created) == (True, [], True)
    assert_fresh(bench, new)
    assert old.kv(5) == "hello"  # its mapping is nobody else's


def test_a_closed_connection_and_then_a_death_is_proof(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    old.do("disconnect")
    new.ask("attach", pool="kv", mode="rw", epoch=2)
    bench.until_pool("kv", lambda pool: pool.waiting == 1)
    old.kill()
    assert new.answer()["fresh"] is False


def test_without_proof_in_time_there_are_fresh_pages_and_the_old_ones_go_with_their_holder(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    lease, _ = new.hold_kv(2, timeout_seconds=0.01)
    assert lease["fresh"]
    assert_fresh(bench, new)
    found = bench.pool("kv")
    assert found is not None
    assert (found.bytes, found.orphaned_bytes) == (2 * bench.device.unit, bench.device.unit)
    for call, arguments in [
        ("allocate", {"tag": "more", "size_bytes": 4096}),
        ("export", {"tag": "pages"}),
        ("put_manifest", {"manifest": "x"}),
    ]:
        with pytest.raises(GmsError, match="must stop serving") as caught:
            old.do(call, pool="kv", **arguments)
        assert caught.value.code == "fenced"
    old.kill()
    bench.until_pool("kv", lambda pool: (pool.bytes, pool.orphaned_bytes) == (bench.device.unit, 0))


def test_a_fenced_holder_that_lets_go_gives_its_pages_back_while_it_lives(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    new.hold_kv(2, timeout_seconds=0.01)
    old.do("release", pool="kv", quiesced=True)
    bench.until_pool("kv", lambda pool: (pool.bytes, pool.orphaned_bytes) == (bench.device.unit, 0))
    assert_fresh(bench, new)


def test_quiesced_release_hands_over_while_the_holder_lives(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    old.do("put_manifest", pool="kv", manifest="blocks")
    old.do("release", pool="kv", quiesced=True)
    assert bench.pool("kv").state == "COMMITTED"  # type: ignore[union-attr]
    lease, created = new.hold_kv(2, timeout_seconds=0)
    assert (lease["fresh"], lease["manifest"], created) == (False, "blocks", False)
    assert new.kv(5) == "hello"
    assert old.process.process.poll() is None


def test_a_release_that_is_not_quiesced_can_only_be_taken_back_by_the_same_process(bench: Bench) -> None:
    with bench.connect("a") as client:
        lease = client.attach("kv_index", LeaseMode.RW, epoch=1)
        lease.allocate("index", 4096).close()
        lease.release()
        lease = client.attach("kv_index", LeaseMode.RW, epoch=1, timeout_seconds=0)
        lease.release()
        with pytest.raises(GmsError) as caught:
            bench.agent("b").do("attach", pool="kv_index", mode="rw", epoch=1)
        assert caught.value.code == "stale_epoch"
        with bench.connect("a again") as second:
            again = second.attach("kv_index", LeaseMode.RW, epoch=1, timeout_seconds=0)
            assert (again.generation, again.fresh) == (lease.generation, False)


def test_an_older_epoch_is_refused(bench: Bench) -> None:
    old, new = holder(bench, epoch=7), bench.agent("b")
    for epoch in (6, 7):
        with pytest.raises(GmsError, match="has seen epoch 7") as caught:
            new.hold_kv(epoch)
        assert (caught.value.code, caught.value.retryable) == ("stale_epoch", False)
    old.kill()
    with pytest.raises(GmsError):
        new.hold_kv(6)
    new.hold_kv(8)
    assert new.kv(5) == "hello"


def test_a_newer_epoch_overtakes_one_that_waits(bench: Bench) -> None:
    old, late, newest = holder(bench), bench.agent("b"), bench.agent("c")
    late.ask("attach", pool="kv", mode="rw", epoch=2)
    bench.until_pool("kv", lambda pool: pool.waiting == 1)
    newest.ask("attach", pool="kv", mode="rw", epoch=3)
    with pytest.raises(GmsError) as caught:
        late.answer()
    assert caught.value.code == "stale_epoch"
    old.kill()
    assert newest.answer()["fresh"] is False


def test_the_ranks_of_an_engine_must_be_gone_too(bench: Bench) -> None:
    """They map its pages as well; what the engine itself says of its end does not speak for them."""
    ranks = [bench.agent("rank", connect=False) for _ in range(2)]
    old, new = holder(bench, pids=tuple(rank.pid for rank in ranks)), bench.agent("b")
    new.ask("attach", pool="kv", mode="rw", epoch=2)
    bench.until_pool("kv", lambda pool: pool.waiting == 1)
    for dead in (old, ranks[0]):
        dead.kill()
        with bench.connect() as client:
            pool = client.status().pools[0]
            assert (pool.waiting, pool.state) == (1, "WRITING")
    ranks[1].kill()
    assert new.answer()["fresh"] is False
    with bench.connect() as client:
        until(lambda: client.status().clients == 2, "the dead are forgotten")


def test_pages_of_another_configuration_are_replaced(bench: Bench) -> None:
    """An engine with other blocks finds the pages of the one before it, and has no use for them."""
    old, new = holder(bench, units=3), bench.agent("b")
    old.kill()
    lease, created = new.hold_kv(2, size_bytes=2 * bench.device.unit)
    assert (lease["tags"], created) == (["pages"], True)
    assert_fresh(bench, new)
    with bench.connect() as client:
        assert client.status().total_bytes == 2 * bench.device.unit
    with pytest.raises(GmsError) as caught:  # its own size is another matter: that is a mistake
        new.do("allocate", pool="kv", tag="pages", size_bytes=3 * bench.device.unit)
    assert caught.value.code == "size_mismatch"


def test_allocations_are_idempotent_and_never_committed(bench: Bench) -> None:
    with bench.connect() as client:
        unit = bench.device.unit
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        with lease.allocate("pages", unit + 1) as first, lease.allocate("pages", unit + 1) as second:
            assert (first.size_bytes, first.created, second.created) == (2 * unit, True, False)
        assert [info.tag for info in lease.allocations] == ["pages"]
        assert client.status().total_bytes == 2 * unit
        with pytest.raises(GmsError) as caught:
            lease.commit(b"")
        assert caught.value.code == "not_permitted"
        with pytest.raises(GmsError) as caught:
            client.attach("kv_index", LeaseMode.RO)
        assert caught.value.code == "not_permitted"


def test_what_a_holder_says_of_its_pages_goes_to_the_next(bench: Bench) -> None:
    old, new = holder(bench), bench.agent("b")
    old.do("put_manifest", pool="kv", manifest="first")
    old.do("put_manifest", pool="kv", manifest="second")
    with bench.connect() as client:
        found = client.get_manifest("kv")
        assert (found.manifest, [info.tag for info in found.allocations]) == (b"second", ["pages"])
        old.kill()
        assert new.hold_kv(2)[0]["manifest"] == "second"
        third = bench.agent("c")
        lease, _ = third.hold_kv(3, timeout_seconds=0.01)  # without proof: fresh pages, and nothing said of them
        assert (lease["fresh"], lease["manifest"]) == (True, "")
        assert client.get_manifest("kv").manifest == b""


def test_the_address_of_the_pages_is_the_holders_own(bench: Bench) -> None:
    """Parked, promoted, parked: what is mapped changes, the address does not."""
    agent = holder(bench)
    address = agent.do("map", pool="kv", tag="pages", writable=True)
    for epoch in (2, 3):
        agent.do("release", pool="kv", quiesced=True)
        agent.hold_kv(epoch)
        assert agent.do("map", pool="kv", tag="pages", writable=True) == address
        assert agent.kv(5) == "hello"


# On the host alone: what forks do to mappings


def test_a_forked_child_does_not_keep_a_dead_engines_pages(client: GmsClient, actor: Any) -> None:
    """The child inherits the connection and the descriptor, but no writable mapping; the engine's death is proof."""
    engine = actor("""
        client = connect()
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        pages = lease.allocate("pages", 1 << 20)
        reservation = mapped(pages)
        reservation.write(0, b"hello")
        parent, child = os.pipe()
        if os.fork() == 0:
            os.close(child)
            try:
                with open("/proc/self/maps") as maps:
                    say("inherited" if any(f"{reservation.address:x}-" in line for line in maps) else "not inherited")
                try:
                    client.status()
                except GmsError as error:
                    say(error.code)
                client.close()  # must not end the parent's connection
                say("closed")
                os.read(parent, 1)
            finally:
                os._exit(0)
        say("forked")
        say("still", client.status().clients)
        hear()
    """)
    lines = {engine.line() for _ in range(5)}
    assert lines == {"forked", "still 2", "not inherited", "not_permitted", "closed"}
    engine.kill()
    lease = client.attach("kv", LeaseMode.RW, epoch=2)
    with lease.allocate("pages", 1 << 20) as pages:
        assert not pages.created
        assert os.pread(pages.fd, 5, 0) == b"hello"


def test_a_child_that_keeps_the_connection_does_not_keep_the_lease(
    client: GmsClient, actor: Any, eventually: Callable[..., None], socket_path: Path
) -> None:
    """The engine is dead; that its socket is still open in some child means nothing."""
    engine = actor("""
        client = connect()
        client.attach("kv", LeaseMode.RW, epoch=1).allocate("pages", 4096)
        parent, child = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(child)
            os.read(parent, 1)  # until the engine is gone: nobody else has the other end
            say("orphaned")
            hear()
            os._exit(0)
        os.close(parent)
        say("forked")
        hear()
    """)
    engine.expect("forked")
    engine.kill()
    engine.expect("orphaned")
    eventually(lambda: client.status().clients == 1, "the engine is gone for the service")
    assert client.attach("kv", LeaseMode.RW, epoch=2, timeout_seconds=0).generation == 1
    engine.tell()
