from __future__ import annotations

import asyncio
import logging

import pytest

from gms import events as events_module
from gms.events import EventLog
from gms.protocol import MAX_EVENTS
from tests.unit.gms.memory_backend import turns


def emitted(log: EventLog, count: int) -> None:
    for _ in range(count):
        log.emit("granted", f"event {log.last + 1}", pool="kv", client="engine a")


async def test_events_are_numbered_from_one_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    assert log.last == 0
    with caplog.at_level(logging.DEBUG, "gms"):
        log.emit("granted", "engine a holds kv", pool="kv", client="engine a")
        log.emit("released", "50% done", level=logging.DEBUG)
    first, second = await log.after(0, 0.0)
    assert (first.seq, first.kind, first.pool, first.client, first.detail) == (
        1,
        "granted",
        "kv",
        "engine a",
        "engine a holds kv",
    )
    assert (second.seq, second.pool, second.client) == (2, "", "")
    assert first.unix_seconds <= second.unix_seconds
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "engine a holds kv"),
        ("DEBUG", "50% done"),
    ]


async def test_only_the_new_ones_and_the_oldest_of_them_first() -> None:
    log = EventLog()
    emitted(log, MAX_EVENTS + 10)
    assert [event.seq for event in await log.after(MAX_EVENTS + 5, 0.0)] == list(range(MAX_EVENTS + 6, MAX_EVENTS + 11))
    seen: list[int] = []
    while events := await log.after(seen[-1] if seen else 0, 0.0):
        assert len(events) <= MAX_EVENTS
        seen += [event.seq for event in events]
    assert seen == list(range(1, log.last + 1))


async def test_what_is_older_than_is_kept_is_gone() -> None:
    log = EventLog()
    emitted(log, events_module.KEPT + 5)
    assert (await log.after(0, 0.0))[0].seq == 6
    assert len(log._events) == events_module.KEPT


async def test_whoever_waits_is_told_of_the_first_one() -> None:
    log = EventLog()
    emitted(log, 1)
    waiting = [asyncio.create_task(log.after(1, 10.0)) for _ in range(3)]
    later = asyncio.create_task(log.after(2, 10.0))
    await turns()
    assert not any(task.done() for task in waiting)
    emitted(log, 1)
    assert [[event.seq for event in events] for events in await asyncio.gather(*waiting)] == [[2]] * 3
    await turns()
    assert not later.done()
    emitted(log, 1)
    assert [event.seq for event in await later] == [3]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
async def test_waiting_ends_with_nothing(seconds: float) -> None:
    log = EventLog()
    emitted(log, 3)
    assert await log.after(3, seconds) == []
    assert await log.after(99, seconds) == []  # a number of an earlier service


async def test_waiting_can_be_cancelled() -> None:
    waiting = asyncio.create_task(EventLog().after(0, 10.0))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
