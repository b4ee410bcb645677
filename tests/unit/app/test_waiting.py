"""Who gets which place, and in which order. The registry has no sockets here."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager

import pytest

from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.fleet.routing import RoundRobinRouter
from app.openai.errors import GatewayError
from app.relay.search import Search
from app.relay.waiting import WaitQueue
from tests.unit.app.test_registry import A, B, FakeSession, session


class Gateway:
    """Searches in the order in which they were made."""

    def __init__(self, limit: int = 100, **options: float) -> None:
        self.registry = WorkerRegistry([A, B], connect_timeout=1, heartbeat_timeout=3, **options)
        self.queue = WaitQueue(self.registry, limit=limit)
        self.router = RoundRobinRouter()
        self.searches = 0

    def worker(self, address: object = A, *, capacity: int = 1, models: tuple[str, ...] = ("m",)) -> FakeSession:
        watch = session(self.registry, A if address is A else B)
        watch.say(capacity=capacity, models=models)
        return watch

    def search(self, model: str = "m", *, wait: float = 15.0, home: float = 0.0) -> Search:
        self.searches += 1
        return Search(self.registry, self.router, self.queue, model, order=self.searches, limit=wait, home=home)


class Line:
    """A search that stands in line until the test lets it go on."""

    def __init__(self, search: Search) -> None:
        self.search = search
        assert search.find() is None
        self._waiting: AbstractContextManager[asyncio.Future[None]] = search.waiting()
        self.woken = self._waiting.__enter__()

    def go_on(self) -> Replica | None:
        self._waiting.__exit__(None, None, None)
        return self.search.find()

    @property
    def served(self) -> bool:
        return self.woken.done()


async def test_room_is_used_and_given_back() -> None:
    gateway = Gateway()
    gateway.worker(capacity=2)
    first, second = gateway.search(), gateway.search()
    replica = first.find()
    assert replica is not None
    assert first.find() is replica  # the same place, not another one
    assert second.find() is replica
    assert replica.room.own == 2
    third = Line(gateway.search())
    assert not third.served
    first.took(replica)
    first.end()
    assert third.served
    assert third.go_on() is replica
    second.end()
    second.end()
    third.search.end()
    assert replica.room.own == 0
    assert gateway.queue.waiting == 0


async def test_oldest_first_and_nobody_overtakes() -> None:
    gateway = Gateway()
    watch = gateway.worker()
    holder = gateway.search()
    holder.find()
    lines = [Line(gateway.search()) for _ in range(3)]
    newcomer = gateway.search()
    holder.end()
    assert newcomer.find() is None
    assert [line.served for line in lines] == [True, False, False]
    watch.say(capacity=2)
    assert [line.served for line in lines] == [True, True, False]


async def test_one_that_was_turned_away_keeps_its_age() -> None:
    gateway = Gateway()
    gateway.worker(capacity=2)
    old, other = gateway.search(), gateway.search()
    replica = old.find()
    assert replica is not None
    assert other.find() is replica
    young = Line(gateway.search())
    old.refused(replica)
    again = Line(old)
    other.end()
    assert (again.served, young.served) == (True, False)


async def test_a_full_model_is_in_nobodys_way() -> None:
    gateway = Gateway(limit=2)
    gateway.worker(A, models=("m",))
    gateway.worker(B, models=("n",), capacity=3)
    gateway.search("m").find()
    lines = [Line(gateway.search("m")) for _ in range(2)]
    for _ in range(3):
        assert gateway.search("n").find() is not None
    Line(gateway.search("n"))  # a line of its own
    with pytest.raises(GatewayError) as caught:
        Line(gateway.search("m"))
    assert (caught.value.status, caught.value.refusal) == (429, "queue_full")
    assert not any(line.served for line in lines)


async def test_models_of_one_worker_are_served_by_age() -> None:
    gateway = Gateway()
    gateway.worker(models=("m", "n"))
    holder = gateway.search("m")
    holder.find()
    lines = [Line(gateway.search(model)) for model in ("n", "m", "n", "")]
    for served in range(4):
        holder.end()
        assert [line.served for line in lines] == [True] * (served + 1) + [False] * (3 - served)
        lines[served].go_on()
        holder = lines[served].search


async def test_who_cannot_use_what_is_free_stands_in_nobodys_way() -> None:
    gateway = Gateway()
    gateway.worker()
    hurt, other = gateway.search(), gateway.search()
    replica = hurt.find()
    assert replica is not None
    hurt.broke(replica, time.monotonic())
    hurt_line = Line(hurt)
    assert other.find() is replica
    third = Line(gateway.search())
    other.end()
    assert (hurt_line.served, third.served) == (False, True)


async def test_a_refusal_is_asked_about_again_after_a_pause_by_one() -> None:
    gateway = Gateway()
    gateway.worker(capacity=8)
    first = gateway.search()
    replica = first.find()
    assert replica is not None
    replica.room._pause = 1.0  # longer than what comes before it is looked at; how long it is, is for test_room.py
    began = time.monotonic()
    first.refused(replica)
    lines = [Line(first), *(Line(gateway.search()) for _ in range(3))]
    async with asyncio.timeout(20):
        await lines[0].woken
    assert time.monotonic() - began > 0.9
    assert [line.served for line in lines] == [True, False, False, False]


async def test_a_place_that_was_given_to_one_who_has_left() -> None:
    gateway = Gateway()
    gateway.worker()
    holder = gateway.search()
    holder.find()
    leaver, next_one = Line(gateway.search()), Line(gateway.search())
    holder.end()
    assert leaver.served
    leaver._waiting.__exit__(None, None, None)
    leaver.search.end()  # its client is gone
    assert next_one.served


async def test_the_lines_end() -> None:
    gateway = Gateway(limit=0)
    with pytest.raises(GatewayError) as caught:
        Line(gateway.search())
    assert caught.value.refusal == "queue_full"
    gateway.worker(capacity=1)
    holder = gateway.search()
    replica = holder.find()
    assert replica is not None
    with pytest.raises(GatewayError) as caught:
        Line(gateway.search())
    assert caught.value.refusal == "queue_full"
    holder.refused(replica)  # it was let in before: it may wait
    assert not Line(holder).served


async def test_who_waits_for_a_model_that_nobody_has() -> None:
    gateway = Gateway()
    line = Line(gateway.search("x"))
    gateway.worker()
    assert line.served
    with pytest.raises(GatewayError) as caught:
        line.go_on()
    assert caught.value.code == "model_not_found"


async def test_who_waits_learns_that_nobody_is_left_who_could_know() -> None:
    gateway = Gateway()
    gateway.worker(A).end()
    line = Line(gateway.search())
    gateway.registry.follow([B])
    gateway.registry._departed["m",] -= 61
    gateway.worker(B, models=("n",))
    assert line.served
    with pytest.raises(GatewayError) as caught:
        line.go_on()
    assert caught.value.code == "model_not_found"


async def test_a_long_line_is_no_work_while_there_is_no_room() -> None:
    gateway = Gateway(limit=5000)
    watch = gateway.worker()
    gateway.search().find()
    looked = 0

    def looks(now: float) -> bool:
        nonlocal looked
        looked += 1
        return False

    lines = [Line(gateway.search()) for _ in range(5000)]
    for waiter in gateway.queue._lines["m"]:
        object.__setattr__(waiter, "take", looks)
    for seq in range(100):
        watch.say(seq=seq, inflight=1)
    assert looked == 0
    assert not any(line.served for line in lines)


def interrupted(gateway: Gateway, replica: Replica | None = None) -> Search:
    """A search whose worker broke."""
    search = gateway.search()
    found = search.find()
    assert found is not None
    search.broke(found, time.monotonic())
    search.come_back(limit=15.0, last=False)
    return search


async def test_interrupted_requests_come_before_older_ones_and_in_order() -> None:
    gateway = Gateway()
    gateway.worker(capacity=2)
    old = gateway.search()
    first, second = interrupted(gateway), interrupted(gateway)
    suspect = interrupted(gateway)
    suspect.come_back(limit=15.0, last=True)
    held = [gateway.search(), gateway.search()]
    assert all(search.find() for search in held)
    new = gateway.search()
    lines = [Line(search) for search in (new, suspect, old, second, first)]
    watch = gateway.worker(B, capacity=1)
    served: list[str] = []
    names = dict(zip(("new", "suspect", "old", "second", "first"), lines, strict=True))
    while len(served) < 5:
        (name,) = [name for name, line in names.items() if line.served and name not in served]
        served.append(name)
        search = names[name].search
        names[name].go_on()
        search.end()
    assert served == ["first", "second", "old", "suspect", "new"]
    assert watch.line.capacity == 1


async def test_a_worker_gets_so_many_interrupted_requests_a_second_and_new_ones_wait_behind_them() -> None:
    gateway = Gateway(resumes_per_second=2)
    dies = gateway.worker(capacity=100)
    searches = [interrupted(gateway) for _ in range(4)]
    gateway.worker(B, capacity=100, models=("m", "n"))
    began = time.monotonic()
    dies.end()
    assert [search.find() is not None for search in searches] == [True, True, False, False]
    lines = [Line(search) for search in searches[2:]]
    new = Line(gateway.search())  # there is room, but not before those
    assert gateway.search("n").find() is not None  # other models' lines are not held up
    async with asyncio.timeout(20):
        await lines[1].woken
        assert time.monotonic() - began > 0.8
        assert lines[0].served
        await new.woken


async def test_new_requests_leave_a_promoted_worker_to_interrupted_ones_for_a_moment() -> None:
    gateway = Gateway(returning_seconds=0.5)
    watch = gateway.worker(capacity=100)
    assert gateway.search().find() is not None  # the first promotion that is known is like any worker
    hurt = interrupted(gateway)
    watch.end()
    next_watch = session(gateway.registry, A, epoch=2)
    next_watch.say(capacity=100)
    (replica,) = gateway.registry.candidates("m")
    began = time.monotonic()
    replica.room.leave_until(began + 1.0)  # in the place of a random time
    new = Line(gateway.search())
    assert not new.served
    assert hurt.find() is replica
    async with asyncio.timeout(20):
        await new.woken
    assert time.monotonic() - began > 0.9
