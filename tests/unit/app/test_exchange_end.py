"""A request ends in the very turn of the loop in which what it waited for came: it takes nothing any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.fleet.routing import RoundRobinRouter
from app.openai.errors import Header
from app.openai.surface import RELAY_ROUTES
from app.relay.deadlines import RelayLimits
from app.relay.downstream import DownstreamObserver
from app.relay.exchange import Exchange
from app.relay.kept import KeepLimits
from app.relay.poison import Standing
from app.relay.recovery import Doubt, Uncounted
from app.relay.relay import Relay
from app.relay.relayed import RelayRequest, Report
from app.relay.waiting import WaitQueue
from app.upstream.connection import UpstreamConnection
from tests.unit.app.test_registry import A, B, FakeSession, session

LIMITS = RelayLimits(
    wait_for_worker=1,
    resume_wait=1,
    first_byte=1,
    stall=1,
    keepalive=1,
    breaks=4,
    resumes=True,
    keep=KeepLimits(),
    max_held_bytes=1,
)


class Client:
    """A ``Downstream`` that is told nothing of interest here."""

    def client(self) -> str:
        return ""

    def observe(self, observer: DownstreamObserver | None) -> None: ...

    def send_head(self, status: int, headers: list[Header]) -> None: ...

    def send_bytes(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def abort(self) -> None: ...

    def settle(self, then: Callable[[], None]) -> None:
        then()


class Events(Uncounted):
    def __init__(self) -> None:
        self.losses: list[str] = []

    def lost(self, *, route: str, reason: str) -> None:
        self.losses.append(reason)


class Scene:
    """Two workers; what they are asked for is a connection that never comes, until the test lets it."""

    def __init__(self) -> None:
        self.registry = WorkerRegistry([A, B], connect_timeout=1, heartbeat_timeout=3)
        self.sessions: list[FakeSession] = [session(self.registry, A), session(self.registry, B)]
        for one in self.sessions:
            one.say()
        self.events = Events()
        relay = Relay(
            registry=self.registry,
            router=RoundRobinRouter(),
            queue=WaitQueue(self.registry, limit=10),
            limits=LIMITS,
            events=self.events,
        )
        self.shared = relay.shared
        self.opening: list[asyncio.Future[UpstreamConnection]] = []
        for replica in self.replicas:
            replica.pool.open = self._open  # type: ignore[method-assign]

    @property
    def replicas(self) -> list[Replica]:
        return [replica for entry in self.registry.entries.values() for replica in entry.replicas.values()]

    def _open(self) -> asyncio.Future[UpstreamConnection]:
        self.opening.append(asyncio.get_running_loop().create_future())
        return self.opening[-1]

    def exchange(self, order: int) -> Exchange:
        route = RELAY_ROUTES["/v1/chat/completions"]
        request = RelayRequest(
            route=route,
            target=b"/v1/chat/completions",
            headers=[],
            model="m",
            streaming=True,
            request_id=b"r",
            gateway_id=b"g",
        )
        return Exchange(self.shared, request, b"{}", Client(), Report(), order=order, on_end=lambda: None)

    def assert_nothing_is_held(self) -> None:
        assert not self.shared.searches
        assert not self.shared.queue.waiting
        assert not any(replica.room.own for replica in self.replicas)
        assert not self.events.losses


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("same_turn", [True, False])
async def test_while_it_hears_what_became_of_its_engines(same_turn: bool) -> None:
    scene = Scene()
    first = scene.replicas[0]
    exchange = scene.exchange(1)
    now = time.monotonic()
    exchange._recover()._doubts += [Doubt(first, now, alone=False)] * 2
    exchange._search.broke(first, now)
    exchange._look()
    await turns()
    assert not scene.opening
    scene.sessions[0].end()  # the engine has died: the request is a suspect
    if not same_turn:
        await turns()
        assert len(scene.opening) == 1
    exchange.client_gone()
    await turns()
    scene.assert_nothing_is_held()
    assert len(scene.opening) == (0 if same_turn else 1)
    assert not len(scene.shared.ward.suspects)


async def test_while_it_waits_to_be_tried_alone() -> None:
    scene = Scene()
    suspects = scene.shared.ward.suspects
    other = scene.exchange(99)._search
    other.suspected(suspects)
    taken = [other.find()]
    another = scene.exchange(98)._search
    another.suspected(suspects)
    taken.append(another.find())
    assert set(taken) == set(scene.replicas)  # each is at an engine of its own
    exchange = scene.exchange(1)
    exchange._recover()._standing = Standing.SUSPECT
    exchange._search.suspected(suspects)
    exchange._look()
    await turns()
    assert scene.shared.queue.waiting == 1
    other.end()
    exchange.client_gone()
    another.cleared()
    another.end()
    await turns()
    scene.assert_nothing_is_held()
    assert not scene.opening
    assert not len(suspects)


async def test_while_it_stands_in_line() -> None:
    scene = Scene()
    for one in scene.sessions:
        one.say(inflight=8)
    exchange = scene.exchange(1)
    exchange._look()
    await turns()
    assert scene.shared.queue.waiting == 1
    scene.sessions[0].say(inflight=0)
    exchange.client_gone()
    await turns()
    scene.assert_nothing_is_held()


async def test_while_it_is_being_connected() -> None:
    """The connection is nobody's then, and kept for the next one."""
    scene = Scene()
    given: list[UpstreamConnection] = []
    for replica in scene.replicas:
        replica.pool.give_back = given.append  # type: ignore[method-assign]
    exchange = scene.exchange(1)
    exchange._look()
    await turns()
    connection = UpstreamConnection(on_idle=given.append, on_break=lambda: None, on_lost=given.append)
    scene.opening[0].set_result(connection)
    exchange.client_gone()
    await turns()
    scene.assert_nothing_is_held()
    assert given == [connection]


async def test_what_is_over_takes_no_place_and_stands_in_no_line() -> None:
    scene = Scene()
    search = scene.exchange(1)._search
    search.end()
    assert search.find() is None
    with pytest.raises(asyncio.CancelledError), search.waiting():
        pass
    scene.assert_nothing_is_held()
