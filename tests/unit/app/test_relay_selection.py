"""Which replica a request goes to next, after one broke under it. The registry has no sockets here."""

from __future__ import annotations

import time
from typing import cast

import pytest

from app.fleet.liveness import SUSPICION_SECONDS
from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.fleet.routing import RoundRobinRouter
from app.openai.surface import RELAY_ROUTES
from app.relay.deadlines import RelayLimits
from app.relay.downstream import Downstream
from app.relay.exchange import Exchange
from app.relay.kept import KeepLimits
from app.relay.relay import Relay
from app.relay.relayed import RelayRequest, Report
from app.relay.waiting import WaitQueue
from tests.unit.app.test_registry import A, B, FakeSession, session

LIMITS = RelayLimits(
    wait_for_worker=1,
    resume_wait=1,
    first_byte=1,
    stall=1,
    keepalive=1,
    breaks=3,
    resumes=True,
    keep=KeepLimits(),
    max_held_bytes=1,
)
LATER = SUSPICION_SECONDS + 0.1


@pytest.fixture
async def watches() -> tuple[FakeSession, FakeSession]:
    registry = WorkerRegistry([A, B], connect_timeout=1, heartbeat_timeout=3)
    both = session(registry, A), session(registry, B)
    for watch in both:
        watch.say()
    return both


@pytest.fixture
def exchange(watches: tuple[FakeSession, FakeSession]) -> Exchange:
    request = RelayRequest(
        route=RELAY_ROUTES["/tokenize"],
        target=b"/tokenize",
        headers=[],
        model="m",
        streaming=False,
        request_id=b"r",
        gateway_id=b"g",
    )
    registry = watches[0].registry
    queue = WaitQueue(registry, limit=10)
    shared = Relay(registry=registry, router=RoundRobinRouter(), queue=queue, limits=LIMITS).shared
    return Exchange(shared, request, b"{}", cast(Downstream, None), Report(), order=1, on_end=lambda: None)


def chosen(exchange: Exchange) -> str | None:
    replica = exchange._search.find()
    exchange._search.unresumed()  # gives the place back
    return None if replica is None else replica.key.worker


def replica_of(watch: FakeSession) -> Replica:
    (replica,) = watch.registry.entries[watch.address].replicas.values()
    return replica


async def test_what_broke_is_the_last_choice(exchange: Exchange, watches: tuple[FakeSession, FakeSession]) -> None:
    one, two = watches
    exchange._search.broke(replica_of(one), time.monotonic())
    one.say(later=LATER)  # it has outlived the break, and still:
    assert [chosen(exchange) for _ in range(3)] == ["pod-b"] * 3
    exchange._search.unreached(replica_of(two))
    assert chosen(exchange) == "pod-a"


async def test_no_later_line_no_second_try(exchange: Exchange, watches: tuple[FakeSession, FakeSession]) -> None:
    one, two = watches
    two.end()
    exchange._search.broke(replica_of(one), time.monotonic())
    one.say(later=SUSPICION_SECONDS / 2)
    assert chosen(exchange) is None
    one.say(later=LATER)
    assert chosen(exchange) == "pod-a"
    exchange._search.broke(replica_of(one), time.monotonic())  # each break counts from its own time
    replica_of(one).line_at -= LATER
    assert chosen(exchange) is None


async def test_it_rests_like_any_other(exchange: Exchange, watches: tuple[FakeSession, FakeSession]) -> None:
    one, two = watches
    two.end()
    exchange._search.broke(replica_of(one), time.monotonic())
    one.say(later=LATER)
    exchange._search.unreached(replica_of(one))
    assert chosen(exchange) is None
