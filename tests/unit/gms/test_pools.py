"""Every state x every event of both kinds of pool, then the stories that the tables cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gms.arbiter import MAX_POOLS, Arbiter
from gms.leases import Action, Drop, Grant, PoolState, Refuse, Request
from gms.protocol import ErrorCode, LeaseMode

W, R, N = 1, 2, 3  # the writer or holder, a reader, the newcomer
WEIGHTS, KV = "weights/k", "kv"
RW, RO, ANY = LeaseMode.RW, LeaseMode.RO, LeaseMode.RW_OR_RO


def ask(client: int, pool: str, mode: LeaseMode = RW, epoch: int = 0, deadline: float = 10.0) -> Request:
    return Request(client * 100 + epoch, client, f"engine {client}", pool, mode, epoch, deadline)


def short(actions: list[Action]) -> list[str]:
    """Actions in words: who got what."""
    words = []
    for action in actions:
        match action:
            case Grant():
                words.append(f"{action.request.client} gets {action.mode} {action.generation}")
            case Refuse():
                words.append(f"{action.request.client} refused {action.code}")
            case Drop():
                words.append(f"drop {action.generation}")
    return words


def leave(arbiter: Arbiter, client: int, proof: bool) -> list[Action]:
    """The client's connection is gone, and with `proof` so are its processes."""
    return [action for pool in list(arbiter.pools) for action in arbiter.release(client, pool, proof)]


def state(arbiter: Arbiter, pool: str) -> PoolState:
    return arbiter.pools[pool].state if pool in arbiter.pools else PoolState.EMPTY


def empty() -> Arbiter:
    return Arbiter()


def writing() -> Arbiter:
    arbiter = Arbiter()
    arbiter.attach(ask(W, WEIGHTS))
    return arbiter


def read() -> Arbiter:
    """The writer committed, and reads on."""
    arbiter = writing()
    arbiter.commit(W, WEIGHTS)
    return arbiter


def committed() -> Arbiter:
    arbiter = read()
    leave(arbiter, W, proof=True)
    return arbiter


def rewriting() -> Arbiter:
    """Generation 1 is read by R while W stages generation 2."""
    arbiter = committed()
    arbiter.attach(ask(R, WEIGHTS, RO))
    arbiter.attach(ask(W, WEIGHTS))
    return arbiter


Event = Callable[[Arbiter], list[Action]]
WEIGHT_EVENTS: dict[str, Event] = {
    "rw": lambda a: a.attach(ask(N, WEIGHTS, RW)),
    "ro": lambda a: a.attach(ask(N, WEIGHTS, RO)),
    "any": lambda a: a.attach(ask(N, WEIGHTS, ANY)),
    "again": lambda a: a.attach(ask(W, WEIGHTS, RW)),
    "commit": lambda a: a.commit(W, WEIGHTS),
    "killed": lambda a: leave(a, W, proof=True),
    "hung up": lambda a: leave(a, W, proof=False),
    "released": lambda a: a.release(W, WEIGHTS, proof=True),
    "late": lambda a: a.expire(99.0),
}
RAISES = ["raises"]
WEIGHT_TABLE: dict[str, tuple[Callable[[], Arbiter], dict[str, tuple[list[str], str]]]] = {
    "EMPTY": (
        empty,
        {
            "rw": (["3 gets rw 1"], "WRITING"),
            "ro": ([], "EMPTY"),
            "any": (["3 gets rw 1"], "WRITING"),
            "again": (["1 gets rw 1"], "WRITING"),
            "commit": (RAISES, "EMPTY"),
            "killed": ([], "EMPTY"),
            "hung up": ([], "EMPTY"),
            "released": ([], "EMPTY"),
            "late": ([], "EMPTY"),
        },
    ),
    "WRITING": (
        writing,
        {
            "rw": ([], "WRITING"),
            "ro": ([], "WRITING"),
            "any": ([], "WRITING"),
            "again": (["1 refused already_attached"], "WRITING"),
            "commit": ([], "READ"),
            "killed": (["drop 1"], "EMPTY"),
            "hung up": ([], "EMPTY"),
            "released": (["drop 1"], "EMPTY"),
            "late": ([], "WRITING"),
        },
    ),
    "READ": (
        read,
        {
            "rw": (["3 gets rw 2"], "WRITING"),
            "ro": (["3 gets ro 1"], "READ"),
            "any": (["3 gets ro 1"], "READ"),
            "again": (["1 refused already_attached"], "READ"),
            "commit": (RAISES, "READ"),
            "killed": ([], "COMMITTED"),
            "hung up": ([], "COMMITTED"),
            "released": ([], "COMMITTED"),
            "late": ([], "READ"),
        },
    ),
    "COMMITTED": (
        committed,
        {
            "rw": (["3 gets rw 2"], "WRITING"),
            "ro": (["3 gets ro 1"], "READ"),
            "any": (["3 gets ro 1"], "READ"),
            "again": (["1 gets rw 2"], "WRITING"),
            "commit": (RAISES, "COMMITTED"),
            "killed": ([], "COMMITTED"),
            "hung up": ([], "COMMITTED"),
            "released": ([], "COMMITTED"),
            "late": ([], "COMMITTED"),
        },
    ),
    "WRITING over READ": (
        rewriting,
        {
            "rw": ([], "WRITING"),
            "ro": (["3 gets ro 1"], "WRITING"),
            "any": (["3 gets ro 1"], "WRITING"),
            "again": (["1 refused already_attached"], "WRITING"),
            "commit": ([], "READ"),
            "killed": (["drop 2"], "READ"),
            "hung up": ([], "READ"),
            "released": (["drop 2"], "READ"),
            "late": ([], "WRITING"),
        },
    ),
}


def kv_held() -> Arbiter:
    arbiter = Arbiter()
    arbiter.attach(ask(W, KV, epoch=5))
    return arbiter


def kv_kept() -> Arbiter:
    """The holder died: pages stand, nobody holds them."""
    arbiter = kv_held()
    leave(arbiter, W, proof=True)
    return arbiter


def kv_unproved() -> Arbiter:
    arbiter = kv_held()
    leave(arbiter, W, proof=False)
    return arbiter


def kv_awaited() -> Arbiter:
    """W holds epoch 5, R waits with epoch 6."""
    arbiter = kv_held()
    assert arbiter.attach(ask(R, KV, epoch=6)) == []
    return arbiter


def kv_orphaned() -> Arbiter:
    """R took over with fresh pages, W lives on with the old ones."""
    arbiter = kv_awaited()
    assert short(arbiter.expire(10.0)) == ["2 gets rw 2"]
    return arbiter


KV_EVENTS: dict[str, Event] = {
    "older": lambda a: a.attach(ask(N, KV, epoch=4)),
    "same": lambda a: a.attach(ask(N, KV, epoch=5)),
    "newer": lambda a: a.attach(ask(N, KV, epoch=7)),
    "reader": lambda a: a.attach(ask(N, KV, RO, epoch=7)),
    "again": lambda a: a.attach(ask(W, KV, epoch=8)),
    "killed": lambda a: leave(a, W, proof=True),
    "hung up": lambda a: leave(a, W, proof=False),
    "quiesced": lambda a: a.release(W, KV, proof=True),
    "late": lambda a: a.expire(10.0),
}
KV_TABLE: dict[str, tuple[Callable[[], Arbiter], dict[str, tuple[list[str], str]]]] = {
    "EMPTY": (
        empty,
        {
            "older": (["3 gets rw 1"], "WRITING"),
            "same": (["3 gets rw 1"], "WRITING"),
            "newer": (["3 gets rw 1"], "WRITING"),
            "reader": (["3 refused not_permitted"], "EMPTY"),
            "again": (["1 gets rw 1"], "WRITING"),
            "killed": ([], "EMPTY"),
            "hung up": ([], "EMPTY"),
            "quiesced": ([], "EMPTY"),
            "late": ([], "EMPTY"),
        },
    ),
    "held": (
        kv_held,
        {
            "older": (["3 refused stale_epoch"], "WRITING"),
            "same": (["3 refused stale_epoch"], "WRITING"),
            "newer": ([], "WRITING"),
            "reader": (["3 refused not_permitted"], "WRITING"),
            "again": (["1 refused already_attached"], "WRITING"),
            "killed": ([], "COMMITTED"),
            "hung up": ([], "WRITING"),
            "quiesced": ([], "COMMITTED"),
            "late": ([], "WRITING"),
        },
    ),
    "kept": (
        kv_kept,
        {
            "older": (["3 refused stale_epoch"], "COMMITTED"),
            "same": (["3 gets rw 1"], "WRITING"),
            "newer": (["3 gets rw 1"], "WRITING"),
            "reader": (["3 refused not_permitted"], "COMMITTED"),
            "again": (["1 gets rw 1"], "WRITING"),
            "killed": ([], "COMMITTED"),
            "hung up": ([], "COMMITTED"),
            "quiesced": ([], "COMMITTED"),
            "late": ([], "COMMITTED"),
        },
    ),
    "unproved": (
        kv_unproved,
        {
            "older": (["3 refused stale_epoch"], "WRITING"),
            "same": (["3 refused stale_epoch"], "WRITING"),
            "newer": ([], "WRITING"),
            "reader": (["3 refused not_permitted"], "WRITING"),
            "again": (["1 gets rw 1"], "WRITING"),
            "killed": ([], "COMMITTED"),
            "hung up": ([], "WRITING"),
            "quiesced": ([], "COMMITTED"),
            "late": ([], "WRITING"),
        },
    ),
    "awaited": (
        kv_awaited,
        {
            "older": (["3 refused stale_epoch"], "WRITING"),
            "same": (["3 refused stale_epoch"], "WRITING"),
            "newer": (["2 refused stale_epoch"], "WRITING"),
            "reader": (["3 refused not_permitted"], "WRITING"),
            "again": (["1 refused already_attached"], "WRITING"),
            "killed": (["2 gets rw 1"], "WRITING"),
            "hung up": ([], "WRITING"),
            "quiesced": (["2 gets rw 1"], "WRITING"),
            "late": (["2 gets rw 2"], "WRITING"),
        },
    ),
    "orphaned": (
        kv_orphaned,
        {
            "older": (["3 refused stale_epoch"], "WRITING"),
            "same": (["3 refused stale_epoch"], "WRITING"),
            "newer": ([], "WRITING"),
            "reader": (["3 refused not_permitted"], "WRITING"),
            "again": ([], "WRITING"),
            "killed": (["drop 1"], "WRITING"),
            "hung up": ([], "WRITING"),
            "quiesced": (["drop 1"], "WRITING"),
            "late": ([], "WRITING"),
        },
    ),
}


def cells(table: dict[str, tuple[Callable[[], Arbiter], dict[str, tuple[list[str], str]]]]) -> list[object]:
    return [
        pytest.param(build, event, *expected, id=f"{name}-{event}")
        for name, (build, row) in table.items()
        for event, expected in row.items()
    ]


def check(build: Callable[[], Arbiter], event: Event, actions: list[str], after: str, pool: str) -> None:
    arbiter = build()
    if actions is RAISES:
        with pytest.raises((ValueError, KeyError)):
            event(arbiter)
    else:
        assert short(event(arbiter)) == actions
    assert state(arbiter, pool) == after


@pytest.mark.parametrize(("build", "event", "actions", "after"), cells(WEIGHT_TABLE))
def test_weights(build: Callable[[], Arbiter], event: str, actions: list[str], after: str) -> None:
    check(build, WEIGHT_EVENTS[event], actions, after, WEIGHTS)


@pytest.mark.parametrize(("build", "event", "actions", "after"), cells(KV_TABLE))
def test_kv(build: Callable[[], Arbiter], event: str, actions: list[str], after: str) -> None:
    check(build, KV_EVENTS[event], actions, after, KV)


def test_the_tables_have_every_cell() -> None:
    assert all(set(row) == set(WEIGHT_EVENTS) for _, row in WEIGHT_TABLE.values())
    assert all(set(row) == set(KV_EVENTS) for _, row in KV_TABLE.values())


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


def test_readers_keep_their_generation_and_its_last_one_takes_it_along() -> None:
    arbiter = rewriting()
    assert short(arbiter.commit(W, WEIGHTS)) == []
    assert arbiter.lease(R, WEIGHTS) is not None
    assert arbiter.lease(R, WEIGHTS).generation == 1  # type: ignore[union-attr]
    assert short(leave(arbiter, R, proof=False)) == ["drop 1"]
    assert short(arbiter.attach(ask(N, WEIGHTS, RO))) == ["3 gets ro 2"]


def test_a_commit_drops_a_generation_that_nobody_reads() -> None:
    arbiter = committed()
    arbiter.attach(ask(N, WEIGHTS, RW))
    assert short(arbiter.commit(N, WEIGHTS)) == ["drop 1"]


def test_pages_of_a_writer_that_hung_up_wait_for_its_death() -> None:
    arbiter = writing()
    assert short(leave(arbiter, W, proof=False)) == []
    assert arbiter.suspected(W)
    assert short(arbiter.attach(ask(N, WEIGHTS, ANY))) == ["3 gets rw 2"]
    assert short(leave(arbiter, W, proof=True)) == ["drop 1"]
    assert not arbiter.suspected(W)


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


def test_an_empty_weights_pool_is_forgotten() -> None:
    arbiter = writing()
    leave(arbiter, W, proof=True)
    assert arbiter.pools == {}


def test_pools_are_bounded() -> None:
    arbiter = Arbiter()
    for number in range(MAX_POOLS):
        arbiter.attach(ask(number, f"weights/{number}"))
    assert short(arbiter.attach(ask(999, "weights/more"))) == ["999 refused too_many"]


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
