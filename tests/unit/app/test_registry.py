"""The registry without sockets: lines and ends of watches go in as calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest

from app.address import Address
from app.fleet.deaths import Fate
from app.fleet.liveness import ReplicaKey, WorkerState
from app.fleet.registry import WorkerRegistry
from app.fleet.replica import HISTORY_LENGTH
from app.fleet.watch import WatchSession
from workers.contract import Role, WatchLine

A, B = Address("a", 1), Address("b", 1)


@dataclass(eq=False)
class FakeSession:
    """What the registry needs of a watch connection."""

    registry: WorkerRegistry
    address: Address
    line: WatchLine
    key: ReplicaKey | None = None
    problem: str = ""
    line_at: float = field(default_factory=time.monotonic)

    def say(self, *, later: float = 0.0, **changes: object) -> bool:
        self.line = msgspec.structs.replace(self.line, **changes)
        self.key = ReplicaKey(self.line.worker, self.line.instance, self.line.epoch)
        self.line_at = time.monotonic() + later
        return self.registry.watch_line(cast(WatchSession, self), self.key, self.line)

    def end(self) -> None:
        self.registry.watch_gone(cast(WatchSession, self))


@pytest.fixture
async def registry() -> WorkerRegistry:
    return WorkerRegistry([A, B], connect_timeout=1, heartbeat_timeout=3)


def session(registry: WorkerRegistry, address: Address = A, *, epoch: int = 1, model: str = "m") -> FakeSession:
    line = WatchLine(
        worker=f"pod-{address.host}",
        instance=f"life-{address.host}",
        epoch=epoch,
        engine="a",
        state=Role.ACTIVE,
        models=(model,),
        inflight=0,
        capacity=8,
        steps=0,
        seq=0,
    )
    return FakeSession(registry, address, line)


def states(registry: WorkerRegistry, address: Address = A) -> list[tuple[str, int | None]]:
    return [(item.state.value, item.epoch) for item in registry.entries[address].history]


async def test_a_life(registry: WorkerRegistry) -> None:
    first = session(registry)
    assert registry.candidates("m") == ()
    assert first.say()
    assert [replica.key.epoch for replica in registry.candidates("m")] == [1]
    assert registry.candidates("other") == ()
    first.end()
    assert registry.candidates("m") == ()
    session(registry, epoch=2).say()
    assert states(registry) == [("UP", 1), ("SUSPECT", 1), ("DOWN", 1), ("UP", 2)]


async def test_a_broken_stream_makes_it_suspect_until_a_later_line(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.candidates("m")
    replica.pool._on_break()
    assert states(registry)[-1] == ("SUSPECT", 1)
    assert registry.candidates("m") == ()
    watch.say(seq=1)
    assert states(registry)[-1] == ("SUSPECT", 1)
    watch.say(seq=2, later=0.3)
    assert states(registry)[-1] == ("UP", 1)


async def test_whoever_hands_out_workers_is_told_when_all_is_concluded(registry: WorkerRegistry) -> None:
    seen: list[int] = []
    registry.on_change = lambda: seen.append(len(registry.candidates("m")))
    watch = session(registry)
    watch.say()
    watch.say(state=Role.DRAINING)
    assert seen == [1, 0]
    watch.end()
    assert seen[-1] == 0


async def test_lines_tell_of_room(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say(inflight=8)
    (replica,) = registry.candidates("m")
    assert replica.room.full
    watch.say(inflight=7)
    assert not replica.room.full


async def test_unknown_models(registry: WorkerRegistry) -> None:
    assert not registry.is_unknown("m")  # nobody is there to ask
    watch = session(registry)
    watch.say()
    assert not registry.is_unknown("m")
    assert registry.is_unknown("x")
    assert not registry.is_unknown("")
    watch.say(state=Role.DRAINING)
    assert not registry.is_unknown("x")  # nobody is routable: wait and see
    session(registry, B, model="n").say()
    watch.end()
    assert not registry.is_unknown("m")  # it was there a moment ago
    registry.entries[A].last.line_at -= 61  # type: ignore[union-attr]
    assert registry.is_unknown("m")


async def test_a_second_watch_of_the_same_promotion_is_refused(registry: WorkerRegistry) -> None:
    assert session(registry).say()
    assert not session(registry).say()
    assert session(registry, epoch=2).say()


async def test_steps_are_noted_when_they_advance(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.candidates("m")
    before = replica.steps_at
    watch.say(later=1)
    assert replica.steps_at == before
    watch.say(later=2, steps=1)
    assert replica.steps_at == watch.line_at


async def test_the_history_is_bounded(registry: WorkerRegistry) -> None:
    for epoch in range(HISTORY_LENGTH):
        watch = session(registry, epoch=epoch)
        watch.say()
        watch.end()
    history = registry.entries[A].history
    assert len(history) == HISTORY_LENGTH
    assert history[-1].state is WorkerState.DOWN


async def test_an_address_that_goes_gets_nothing_new_and_leaves_nothing(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    registry.follow([B])
    assert registry.candidates("m") == ()
    assert list(registry.entries) == [B]
    assert not registry.is_unknown("m")  # it was there a moment ago
    assert not watch.say()
    watch.end()
    assert not registry._leaving


async def test_an_address_that_goes_stays_watched_while_streams_run_on_it(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.candidates("m")
    stream = replica.pool._connection()
    registry.follow([B])
    assert registry.candidates("m") == ()
    assert watch.say(steps=5, later=1)
    assert (replica.line.steps, replica.steps_at) == (5, watch.line_at)
    replica.pool._forget(stream)
    assert not registry._leaving
    assert not watch.say()


async def test_an_address_that_comes_back_is_a_new_worker_beside_its_streams(registry: WorkerRegistry) -> None:
    old = session(registry)
    old.say()
    (replica,) = registry.candidates("m")
    stream = replica.pool._connection()
    registry.follow([B])
    registry.follow([A, B])
    assert registry.candidates("m") == ()
    new = session(registry)
    new.say()
    (other,) = registry.candidates("m")
    assert other is not replica
    old.say(state=Role.DRAINING)
    assert registry.candidates("m") == (other,)
    replica.pool._forget(stream)
    old.end()
    assert registry.candidates("m") == (other,)
    assert states(registry) == [("UP", 1)]


async def test_a_watch_that_ends_ends_an_address_that_leaves(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.candidates("m")
    replica.pool._connection()
    registry.follow([])
    watch.end()
    assert not registry._leaving


async def test_the_order_of_addresses_is_that_of_the_last_list(registry: WorkerRegistry) -> None:
    session(registry, A).say()
    session(registry, B).say()
    kept = registry.entries[A]
    registry.follow([B, A])
    assert registry.entries[A] is kept
    assert [replica.address for replica in registry.candidates("m")] == [B, A]


async def test_what_became_of_an_engine(registry: WorkerRegistry) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.entries[A].replicas.values()
    broke_at = time.monotonic()
    assert registry.fate(replica, broke_at) is Fate.OPEN
    changed = registry.changed()
    watch.end()
    assert changed.done()
    assert registry.fate(replica, broke_at) is Fate.DIED


@pytest.mark.parametrize(("state", "problem"), [(Role.DRAINING, ""), (Role.HANDOVER, ""), (Role.ACTIVE, "silent")])
async def test_an_end_that_was_announced_or_is_ours_is_no_death(
    registry: WorkerRegistry, state: Role, problem: str
) -> None:
    watch = session(registry)
    watch.say()
    (replica,) = registry.entries[A].replicas.values()
    watch.say(state=state)
    watch.problem = problem
    watch.end()
    assert registry.fate(replica, time.monotonic()) is Fate.LIVED


async def test_only_a_later_promotion_is_left_to_interrupted_requests() -> None:
    registry = WorkerRegistry([A], connect_timeout=1, heartbeat_timeout=3, returning_seconds=1000)
    watch = session(registry)
    watch.say()
    (replica,) = registry.candidates("m")
    assert replica.room.open(time.monotonic())
    watch.end()
    session(registry, epoch=2).say()
    (replica,) = registry.candidates("m")
    assert not replica.room.open(time.monotonic())
    assert replica.room.open_to_returning(time.monotonic())
    opens_at = replica.room.opens_at(time.monotonic())
    assert opens_at is not None
    assert opens_at <= time.monotonic() + 1000


async def test_a_promotion_after_a_death_tells_how_long_its_parts_took(registry: WorkerRegistry) -> None:
    told: dict[str, float] = {}
    registry.on_recovery = told.__setitem__
    first = session(registry)
    first.say(lock_seconds=100.0)
    assert told == {}
    first.end()
    session(registry, epoch=2).say(lock_seconds=0.25, later=0.01)
    assert told["routable"] == 0.25
    assert 0.2 < told["detect"] < 0.25


async def test_no_recovery_follows_an_orderly_end_nor_a_new_pod(registry: WorkerRegistry) -> None:
    told: dict[str, float] = {}
    registry.on_recovery = told.__setitem__
    first = session(registry)
    first.say()
    first.say(state=Role.DRAINING)
    first.end()
    second = session(registry, epoch=2)
    second.say(lock_seconds=0.25)
    second.end()
    session(registry, epoch=3).say(instance="another", lock_seconds=0.25)
    assert told == {}
