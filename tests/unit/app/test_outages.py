from __future__ import annotations

import asyncio
import logging

import pytest

from app.fleet.outages import NOBODY_SECONDS, OutageNews, Outages, nobody_for_too_long
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle, LifecycleEvent, LifecycleMachine
from app.telemetry import outage_log, regularly
from app.telemetry.outage_log import OutageLog
from tests.unit.app.test_registry import A, B, session

NOTHING = OutageNews([], [])


def test_a_pause_is_no_outage() -> None:
    outages = Outages()
    assert outages.looked({"m"}, now=0) == NOTHING
    assert outages.looked(set(), now=1) == NOTHING
    assert outages.looked(set(), now=1.9) == NOTHING
    assert outages.looked({"m"}, now=2.1) == NOTHING
    assert outages.looked(set(), now=2.2) == NOTHING
    assert outages.looked(set(), now=3.1) == NOTHING
    assert outages.looked(set(), now=3.2).gone == ["m"]


def test_an_outage_is_told_once_and_so_is_its_end() -> None:
    outages = Outages()
    outages.looked({"m", "n"}, now=0)
    outages.looked({"n"}, now=1)
    assert outages.looked({"n"}, now=2) == OutageNews(["m"], [])
    assert outages.looked({"n"}, now=90) == NOTHING
    outages.looked(set(), now=100)
    assert outages.looked({"m"}, now=103) == OutageNews(["n"], ["m"], 102)
    assert outages.looked({"m", "n"}, now=110) == OutageNews([], ["n"], 10)
    assert outages.looked({"m", "n"}, now=120) == NOTHING


def test_what_was_never_served_is_not_missed() -> None:
    outages = Outages()
    assert outages.looked(set(), now=0) == outages.looked(set(), now=100) == NOTHING


def test_names_that_come_and_go_fill_no_memory() -> None:
    outages = Outages()
    for number in range(5000):
        outages.looked({f"m{number}"}, now=number)
    assert len(outages._gone) == 1024
    assert len(outages._told) <= 1024


def test_health_turns_after_a_minute() -> None:
    assert not nobody_for_too_long(None, now=1000)
    assert not nobody_for_too_long(1.0, now=NOBODY_SECONDS + 0.9)
    assert nobody_for_too_long(1.0, now=NOBODY_SECONDS + 1)


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def ready() -> LifecycleMachine:
    lifecycle = LifecycleMachine(lambda state: None)
    lifecycle.fire(LifecycleEvent.DISCOVERED)
    assert lifecycle.state is Lifecycle.READY
    return lifecycle


async def test_the_log_has_each_turn_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = WorkerRegistry([A, B], connect_timeout=1, heartbeat_timeout=1e9)
    clock = Clock(registry.nobody_since or 0.0)
    log = OutageLog(registry, ready(), wait_seconds=15, health_needs_worker=True, clock=clock)
    caplog.set_level(logging.INFO, outage_log.logger.name)
    first, second = session(registry, A), session(registry, B)
    first.say()
    second.say()
    log.look()
    first.end()
    log.look()
    clock.now += 5
    log.look()
    assert caplog.messages == []
    second.end()
    log.look()
    for seconds in (0.9, 0.2, 10, NOBODY_SECONDS, 10):
        clock.now += seconds
        log.look()
    session(registry, A, epoch=2).say()
    log.look()
    log.look()
    assert [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records] == [
        ("WARNING", "no worker takes requests for 'm' any more"),
        ("WARNING", "/health says 503 no_worker from now on"),
        ("INFO", "workers take requests for 'm' again, after 81.1 s"),
        ("INFO", "/health says 200 again"),
    ]


async def test_it_looks_while_inside(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(regularly, "PERIOD_SECONDS", 0.001)
    registry = WorkerRegistry([A], connect_timeout=1, heartbeat_timeout=1e9)
    watch = session(registry, A, model="line\nbreak")
    looks = 0
    enough = asyncio.Event()

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks == 3:
            watch.end()
        if looks == 6:
            enough.set()
        return float(looks)

    watch.say()
    async with OutageLog(
        registry, ready(), wait_seconds=15, resume_wait_seconds=60, health_needs_worker=False, clock=clock
    ) as log:
        async with asyncio.timeout(5):
            await enough.wait()
    assert log._timer is None
    (message,) = caplog.messages
    assert message.startswith(r"no worker takes requests for 'line\nbreak' any more")
    assert "up to 15 s (wait_for_worker_seconds), answers that had begun up to 60 s (resume_wait_seconds)" in message
