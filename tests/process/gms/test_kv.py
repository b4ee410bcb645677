"""The KV pages go from epoch to epoch, and never to two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, GmsError, Lease, LeaseMode
from gms.mapping import Reservation

pytestmark = pytest.mark.process

HOLD = """
client = connect()
lease = client.attach("kv", LeaseMode.RW, epoch={epoch})
pages = lease.allocate("pages", 1 << 20)
reservation = mapped(pages)
reservation.buffer()[:5] = b"hello"
say(lease.fresh, pages.created)
{then}
hear()
"""


def hold(actor: Any, epoch: int = 1, then: str = "") -> Any:
    holder = actor(HOLD.format(epoch=epoch, then=then))
    assert holder.line() == "True True"
    return holder


def content(lease: Lease) -> bytes:
    with lease.allocate("pages", 1 << 20) as pages, Reservation(pages.size_bytes) as range_:
        range_.map(pages.fd, writable=True)
        return bytes(range_.buffer()[:5])


def test_after_a_kill_the_next_epoch_has_the_same_pages(client: GmsClient, actor: Any) -> None:
    holder = hold(actor)
    before = client.status()
    holder.kill()
    lease = client.attach("kv", LeaseMode.RW, epoch=2)
    assert not lease.fresh
    assert [info.tag for info in lease.allocations] == ["pages"]
    assert content(lease) == b"hello"
    after = client.status()
    assert (after.total_bytes, after.pools[0].generation) == (before.total_bytes, before.pools[0].generation)
    assert list(after.bytes_by_owner) == [f"engine test (pid {after.pools[0].leases[0].pid})"]


def test_the_next_epoch_waits_for_the_death(client: GmsClient, actor: Any, eventually: Callable[..., None]) -> None:
    holder = hold(actor)
    heir = actor("""
        lease = connect("b").attach("kv", LeaseMode.RW, epoch=2)
        say(lease.fresh)
        hear()
    """)
    eventually(lambda: client.status().pools[0].waiting == 1, "the heir waits")
    assert client.status().pools[0].leases[0].engine == "a"
    holder.kill()
    assert heir.line() == "False"


def test_a_closed_connection_is_no_proof(client: GmsClient, actor: Any) -> None:
    holder = hold(actor, then='client.close(); say("closed")')
    holder.expect("closed")
    with GmsClient.connect(client._path, engine="c", instance="test") as other:
        lease = other.attach("kv", LeaseMode.RW, epoch=2, timeout_seconds=0.02)
        assert lease.fresh
        assert lease.allocations == ()
        assert content(lease) == bytes(5)


def test_without_proof_in_time_there_are_fresh_pages_and_the_old_ones_go_with_their_holder(
    client: GmsClient, actor: Any, eventually: Callable[..., None]
) -> None:
    holder = hold(
        actor,
        then="""
hear()
try:
    lease.allocate("more", 4096)
except GmsError as error:
    say(error.code)
""",
    )
    lease = client.attach("kv", LeaseMode.RW, epoch=2, timeout_seconds=0.01)
    assert lease.fresh
    assert content(lease) == bytes(5)
    pool = client.status().pools[0]
    assert (pool.bytes, pool.orphaned_bytes) == (2 << 20, 1 << 20)
    holder.tell()
    assert holder.line() == "fenced"
    holder.kill()
    eventually(lambda: client.status().pools[0].bytes == 1 << 20, "the orphan is freed")


def test_quiesced_release_hands_over_while_the_holder_lives(client: GmsClient, actor: Any) -> None:
    holder = hold(
        actor, then='reservation.unmap(); lease.release(quiesced=True); say("released"); hear(); say("alive")'
    )
    holder.expect("released")
    lease = client.attach("kv", LeaseMode.RW, epoch=2, timeout_seconds=0)
    assert not lease.fresh
    assert content(lease) == b"hello"
    holder.tell()
    assert holder.line() == "alive"


def test_a_release_that_is_not_quiesced_can_only_be_taken_back_by_the_same_client(
    client: GmsClient, socket_path: Path
) -> None:
    client.attach("kv", LeaseMode.RW, epoch=1).allocate("pages", 4096).close()
    lease = client.attach("kv_index", LeaseMode.RW, epoch=1)
    lease.release()
    assert client.attach("kv_index", LeaseMode.RW, epoch=1, timeout_seconds=0).generation == lease.generation
    with GmsClient.connect(socket_path, engine="b", instance="test") as other, pytest.raises(GmsError) as caught:
        other.attach("kv_index", LeaseMode.RW, epoch=1)
    assert caught.value.code == "stale_epoch"


def test_an_older_epoch_is_refused(client: GmsClient, actor: Any) -> None:
    holder = hold(actor, epoch=7)
    for epoch in (6, 7):
        with pytest.raises(GmsError, match="has seen epoch 7") as caught:
            client.attach("kv", LeaseMode.RW, epoch=epoch)
        assert (caught.value.code, caught.value.retryable) == ("stale_epoch", False)
    holder.kill()
    with pytest.raises(GmsError):
        client.attach("kv", LeaseMode.RW, epoch=6)
    assert content(client.attach("kv", LeaseMode.RW, epoch=8)) == b"hello"


def test_a_newer_epoch_overtakes_one_that_waits(client: GmsClient, actor: Any, eventually: Callable[..., None]) -> None:
    holder = hold(actor)
    late = actor("""
        try:
            connect("b").attach("kv", LeaseMode.RW, epoch=2)
        except GmsError as error:
            say(error.code)
    """)
    eventually(lambda: client.status().pools[0].waiting == 1, "epoch 2 waits")
    newest = actor('say(connect("c").attach("kv", LeaseMode.RW, epoch=3).fresh); hear()')
    assert late.line() == "stale_epoch"
    holder.kill()
    assert newest.line() == "False"


def test_a_forked_child_does_not_keep_a_dead_engines_pages(client: GmsClient, actor: Any) -> None:
    """The child inherits the connection and the descriptor, but no writable mapping; the engine's death is proof."""
    holder = hold(
        actor,
        then="""
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
""",
    )
    lines = {holder.line() for _ in range(5)}
    assert lines == {"forked", "still 2", "not inherited", "not_permitted", "closed"}
    holder.kill()
    assert content(client.attach("kv", LeaseMode.RW, epoch=2)) == b"hello"


def test_kv_allocations_are_idempotent(client: GmsClient) -> None:
    lease = client.attach("kv", LeaseMode.RW, epoch=1)
    with lease.allocate("pages", 5000) as first, lease.allocate("pages", 5000) as second:
        assert (first.size_bytes, first.created, second.created) == (8192, True, False)
    assert [info.tag for info in lease.allocations] == ["pages"]
    with pytest.raises(GmsError) as caught:
        lease.allocate("pages", 1 << 20)
    assert caught.value.code == "size_mismatch"
    with pytest.raises(GmsError) as caught:
        lease.commit(b"")
    assert caught.value.code == "not_permitted"
    with pytest.raises(GmsError) as caught:
        client.attach("kv_index", LeaseMode.RO)
    assert caught.value.code == "not_permitted"
