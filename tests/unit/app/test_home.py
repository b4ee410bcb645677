"""A request whose worker broke goes to that one's spare, if it had one, and elsewhere if that takes too long."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.fleet.replica import Replica
from app.relay.search import Search
from tests.unit.app.test_registry import A, B, FakeSession, session
from tests.unit.app.test_waiting import Gateway, Line
from workers.contract import Role

MS = 0.001


def broken(gateway: Gateway, *, standby: Role | None, home: float) -> tuple[Search, Replica, FakeSession]:
    """A request that A had, and that has just broken there; B is there, too."""
    watch = session(gateway.registry, A)
    watch.say(capacity=8, standby=standby)
    search = gateway.search(home=home)
    replica = search.find()
    assert replica is not None
    session(gateway.registry, B).say(capacity=8)
    search.broke(replica, time.monotonic())
    search.come_back(limit=15.0, last=False)
    return search, replica, watch


@pytest.mark.parametrize(("standby", "home"), [(None, 1.0), (Role.INIT, 1.0), (Role.STANDBY, 0.0)])
async def test_without_a_spare_or_without_the_time_any_worker_will_do(standby: Role | None, home: float) -> None:
    search, _, watch = broken(Gateway(), standby=standby, home=home)
    watch.end()
    found = search.find()
    assert found is not None
    assert found.address == B


async def test_the_spare_gets_it_though_another_worker_has_room() -> None:
    gateway = Gateway()
    search, _, watch = broken(gateway, standby=Role.STANDBY, home=60.0)
    watch.end()
    line = Line(search)
    assert not line.served
    session(gateway.registry, A, epoch=2).say(capacity=8)
    assert line.served
    found = line.go_on()
    assert found is not None
    assert (found.address, found.key.epoch) == (A, 2)


async def test_it_stands_in_nobodys_way_meanwhile() -> None:
    gateway = Gateway()
    search, _, watch = broken(gateway, standby=Role.STANDBY, home=60.0)
    watch.end()
    line = Line(search)
    other = gateway.search().find()
    assert other is not None
    assert other.address == B
    assert not line.served


async def test_a_spare_that_does_not_come_is_not_waited_for_any_longer() -> None:
    search, _, watch = broken(Gateway(), standby=Role.STANDBY, home=30 * MS)
    watch.end()
    line = Line(search)
    async with asyncio.timeout(5):
        await line.woken
    found = line.go_on()
    assert found is not None
    assert found.address == B


async def test_a_worker_that_lives_has_no_successor_to_wait_for() -> None:
    search, _, watch = broken(Gateway(), standby=Role.STANDBY, home=60.0)
    line = Line(search)
    assert not line.served
    watch.say(later=1.0)
    assert line.served
    found = line.go_on()
    assert found is not None
    assert found.address == B


async def test_a_spare_that_would_not_go_on_with_the_answer_was_not_its_home() -> None:
    gateway = Gateway()
    search, _, watch = broken(gateway, standby=Role.STANDBY, home=60.0)
    watch.end()
    session(gateway.registry, A, epoch=2).say(capacity=8)
    assert search.find() is not None
    search.unresumed()
    addresses = set()
    for _ in range(2):
        found = search.find()
        assert found is not None
        addresses.add(found.address)
        search.stale()
    assert addresses == {A, B}
