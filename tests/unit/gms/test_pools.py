"""What the tables of the pools cannot tell: stories of several steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gms.arbiter import MAX_POOLS, Arbiter
from gms.leases import Drop, PoolState, Refuse
from gms.protocol import ErrorCode
from tests.unit.gms.pool_states import (
    ANY,
    KV,
    RO,
    RW,
    WEIGHTS,
    N,
    R,
    W,
    aborted,
    adopting,
    ask,
    committed,
    condemned_read,
    empty,
    kv_adopting_awaited,
    kv_awaited,
    kv_orphaned,
    kv_unproved_awaited,
    leave,
    rewriting,
    short,
    state,
    writing,
)

# --- weights


def test_the_first_writes_everybody_else_reads_after_its_commit() -> None:
    arbiter = Arbiter()
    assert short(arbiter.attach(ask(1, WEIGHTS, ANY))) == ["1 gets rw 1"]
    assert [arbiter.attach(ask(n, WEIGHTS, ANY)) for n in (2, 3, 4)] == [[], [], []]
    assert short(arbiter.commit(1, WEIGHTS)) == ["2 gets ro 1", "3 gets ro 1", "4 gets ro 1"]


def test_a_dead_writer_is_followed_by_the_first_that_can_write() -> None:
    arbiter = writing()
    arbiter.attach(ask(2, WEIGHTS, RO))
    arbiter.attach(ask(3, WEIGHTS, ANY))
    arbiter.attach(ask(4, WEIGHTS, RW))
    assert short(leave(arbiter, W, proof=True)) == ["drop 1", "3 gets rw 2"]
    assert short(arbiter.commit(3, WEIGHTS)) == ["2 gets ro 2", "4 gets rw 3"]


def test_writers_are_served_in_order_however_many_read() -> None:
    arbiter = rewriting()
    arbiter.attach(ask(4, WEIGHTS, RW))
    arbiter.attach(ask(5, WEIGHTS, RW))
    for reader in range(6, 20):
        assert short(arbiter.attach(ask(reader, WEIGHTS, RO))) == [f"{reader} gets ro 1"]
    assert short(arbiter.commit(W, WEIGHTS)) == ["4 gets rw 3"]
    assert short(leave(arbiter, 4, proof=True)) == ["drop 3", "5 gets rw 4"]


def test_readers_keep_their_generation_and_its_last_one_takes_it_along() -> None:
    arbiter = rewriting()
    assert short(arbiter.commit(W, WEIGHTS)) == []
    lease = arbiter.lease(R, WEIGHTS)
    assert lease is not None
    assert lease.generation == 1
    assert short(leave(arbiter, R, proof=False)) == ["drop 1"]
    assert short(arbiter.attach(ask(N, WEIGHTS, RO))) == ["3 gets ro 2"]


def test_a_commit_drops_a_generation_that_nobody_reads() -> None:
    arbiter = committed()
    arbiter.attach(ask(N, WEIGHTS, RW))
    assert short(arbiter.commit(N, WEIGHTS)) == ["drop 1"]


def test_pages_of_a_writer_that_hung_up_wait_for_its_death() -> None:
    arbiter = aborted()
    assert arbiter.suspected(W)
    assert arbiter.suspected(W, WEIGHTS)
    assert not arbiter.suspected(W, KV)
    assert list(arbiter.pools[WEIGHTS].orphans()) == [1]
    assert short(arbiter.attach(ask(N, WEIGHTS, ANY))) == ["3 gets rw 2"]
    assert short(leave(arbiter, W, proof=True)) == ["drop 1"]
    assert not arbiter.suspected(W)


def test_what_a_broken_connection_staged_waits_for_the_end_of_the_one_that_took_its_place() -> None:
    arbiter = aborted()
    arbiter.inherit(WEIGHTS, frozenset({W}), N)
    assert not arbiter.suspected(W)
    assert arbiter.suspected(N)
    assert leave(arbiter, W, proof=True) == []
    assert short(leave(arbiter, N, proof=True)) == ["drop 1"]
    assert arbiter.pools == {}


def test_a_refusal_for_corruption_names_it_until_something_new_is_committed() -> None:
    arbiter = condemned_read()
    (refusal,) = arbiter.attach(ask(N, WEIGHTS, RO))
    assert isinstance(refusal, Refuse)
    assert "a tensor has changed" in refusal.message
    assert not refusal.retryable
    arbiter.attach(ask(N, WEIGHTS, ANY))
    assert arbiter.attach(ask(R, WEIGHTS, RO)) == []
    assert arbiter.pools[WEIGHTS].corrupt
    assert short(arbiter.commit(N, WEIGHTS)) == ["2 gets ro 2"]
    assert not arbiter.pools[WEIGHTS].corrupt
    assert short(leave(arbiter, W, proof=False)) == ["drop 1"]


def test_condemning_leaves_what_is_being_written_alone() -> None:
    arbiter = committed()
    arbiter.attach(ask(W, WEIGHTS, RW))
    assert short(arbiter.condemn(WEIGHTS, "changed")) == ["drop 1"]
    assert arbiter.condemn(WEIGHTS, "changed") == []
    assert arbiter.attach(ask(R, WEIGHTS, RO)) == []
    assert short(arbiter.commit(W, WEIGHTS)) == ["2 gets ro 2"]


def test_readers_come_back_one_by_one_and_count_as_readers() -> None:
    arbiter = adopting()
    arbiter.adopted(WEIGHTS, N)
    assert state(arbiter, WEIGHTS) is PoolState.COMMITTED
    for client in (R, N):
        arbiter.rejoin(client, WEIGHTS)
    assert short(arbiter.attach(ask(W, WEIGHTS, RW))) == ["1 gets rw 10"]
    assert arbiter.commit(W, WEIGHTS) == []
    assert leave(arbiter, R, proof=False) == []
    assert short(leave(arbiter, N, proof=False)) == ["drop 7"]


def test_only_what_nobody_uses_or_asks_for_is_evicted_the_oldest_first() -> None:
    arbiter = Arbiter()
    for client, pool in enumerate(["weights/a", "weights/b", "weights/c"], 1):
        arbiter.attach(ask(client, pool))
        arbiter.commit(client, pool)
    assert arbiter.evict() == []
    leave(arbiter, 1, proof=True)
    leave(arbiter, 3, proof=True)
    arbiter.attach(ask(4, "weights/a", RO))
    assert arbiter.evict() == [Drop("weights/c", 3)]
    assert arbiter.evict() == []
    assert set(arbiter.pools) == {"weights/a", "weights/b"}


def test_waiting_ends_in_a_refusal_that_says_why() -> None:
    arbiter = writing()
    arbiter.attach(ask(2, WEIGHTS, RO, deadline=3.0))
    arbiter.attach(ask(3, WEIGHTS, RO, deadline=5.0))
    assert arbiter.next_deadline() == 3.0
    assert arbiter.expire(2.9) == []
    (refusal,) = arbiter.expire(3.0)
    assert isinstance(refusal, Refuse)
    assert refusal.retryable
    assert "still writing" in refusal.message
    assert arbiter.next_deadline() == 5.0


@pytest.mark.parametrize(
    ("build", "reason"), [(empty, "nobody has committed"), (writing, "still writing"), (adopting, "being handed back")]
)
def test_what_is_waited_for(build: Callable[[], Arbiter], reason: str) -> None:
    arbiter = build()
    arbiter.attach(ask(N, WEIGHTS, RO))
    assert reason in arbiter.pools[WEIGHTS].cause()


def test_an_empty_weights_pool_is_forgotten() -> None:
    arbiter = writing()
    leave(arbiter, W, proof=True)
    assert arbiter.pools == {}
    arbiter.attach(ask(N, WEIGHTS, RO))
    assert short(arbiter.expire(10.0)) == ["3 refused timeout"]
    assert arbiter.pools == {}


def test_pools_are_bounded_and_make_room_for_each_other() -> None:
    arbiter = Arbiter()
    for number in range(MAX_POOLS):
        arbiter.attach(ask(number, f"weights/{number}"))
    assert short(arbiter.attach(ask(999, "weights/more"))) == ["999 refused too_many"]
    arbiter.commit(7, "weights/7")
    assert short(arbiter.attach(ask(999, "weights/more"))) == ["999 refused too_many"]
    leave(arbiter, 7, proof=False)
    assert short(arbiter.attach(ask(999, "weights/more"))) == ["drop 8", f"999 gets rw {MAX_POOLS + 1}"]
    assert len(arbiter.pools) == MAX_POOLS


# --- kv


def test_a_fenced_holder_has_no_lease_and_is_told_apart() -> None:
    arbiter = kv_orphaned()
    assert arbiter.lease(W, KV) is None
    assert arbiter.fenced(W, KV)
    assert not arbiter.fenced(R, KV)
    assert arbiter.suspected(W)


def test_a_waiter_that_dies_leaves_its_fence() -> None:
    arbiter = kv_awaited()
    leave(arbiter, R, proof=True)
    leave(arbiter, W, proof=True)
    assert short(arbiter.attach(ask(N, KV, epoch=5))) == [f"3 refused {ErrorCode.STALE_EPOCH}"]
    assert short(arbiter.attach(ask(N, KV, epoch=6))) == ["3 gets rw 1"]


def test_an_orphaned_holder_may_come_back_with_a_newer_epoch() -> None:
    arbiter = kv_orphaned()
    arbiter.attach(ask(W, KV, epoch=9))
    assert short(arbiter.release(R, KV, proof=True)) == ["1 gets rw 2"]
    assert short(leave(arbiter, W, proof=True)) == ["drop 1"]
    assert state(arbiter, KV) is PoolState.COMMITTED


def test_a_holder_whose_connection_broke_has_its_pages_again_before_a_waiter() -> None:
    arbiter = kv_unproved_awaited()
    arbiter.inherit(KV, frozenset({W}), N)
    assert not arbiter.suspected(W)
    assert arbiter.pools[KV].may_return(N)
    assert arbiter.adopted(KV, N) == []
    assert not arbiter.suspected(N)
    lease = arbiter.lease(N, KV)
    assert lease is not None
    assert lease.generation == 1
    assert short(leave(arbiter, N, proof=True)) == ["2 gets rw 1"]


def test_an_orphan_that_is_inherited_waits_for_the_heir() -> None:
    arbiter = kv_orphaned()
    arbiter.inherit(KV, frozenset({W, 8}), N)
    assert arbiter.fenced(N, KV)
    assert not arbiter.fenced(W, KV)
    assert leave(arbiter, W, proof=True) == []
    assert short(leave(arbiter, N, proof=True)) == ["drop 1"]


def test_one_that_is_not_back_in_time_is_fenced_for_good() -> None:
    arbiter = kv_adopting_awaited()
    assert short(arbiter.expire(10.0)) == ["drop 7", "2 gets rw 10"]
    assert not arbiter.pools[KV].may_return(W)
    assert arbiter.pools[KV].epoch == 6


def test_epochs_and_generations_as_a_journal_wants_them() -> None:
    arbiter = kv_adopting_awaited()
    pool = arbiter.pools[KV]
    assert (pool.epoch, pool.lease_epoch, pool.standing, arbiter.last_generation) == (6, 5, 7, 9)
    arbiter.adopted(KV, W)
    assert (pool.epoch, pool.lease_epoch, pool.standing) == (6, 5, 7)
    arbiter.expire(10.0)
    assert (pool.epoch, pool.lease_epoch, pool.standing, arbiter.last_generation) == (6, 6, 10, 10)
    assert list(pool.orphans()) == [7]
