from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from workers.engine import EngineDeadError
from workers.engines.sim.batch import Batch, SimRequest
from workers.engines.sim.scheduler import Scheduler

MS = 0.001


def request(max_tokens: int = 3) -> SimRequest:
    return SimRequest(digest=1, prompt_tokens=2, max_tokens=max_tokens)


def one(request: SimRequest) -> int:
    return 1


def test_a_request_gets_its_first_token_when_its_prefill_is_over() -> None:
    batch, asked = Batch(slots=2, ttft_seconds=1.0), request()
    batch.add(asked, now=10.0)
    assert batch.prefill_until() == 11.0
    assert batch.step(one, now=10.999) == []
    assert batch.step(one, now=11.0) == [asked]
    assert batch.prefill_until() is None
    assert asked.tokens == [1]


def test_a_complete_request_leaves_and_the_next_one_takes_its_slot() -> None:
    batch, first, second = Batch(slots=1, ttft_seconds=0.0), request(1), request(1)
    batch.add(first, now=0.0)
    batch.add(second, now=0.0)
    assert (batch.running, batch.waiting, first.slot, second.slot) == (1, 1, 0, -1)
    assert batch.step(one, now=0.0) == [first]
    assert (batch.running, batch.waiting, first.slot, second.slot) == (1, 0, -1, 0)
    assert batch.step(one, now=1.0) == [second]
    assert batch.running == 0


def test_running_requests_never_share_a_slot() -> None:
    batch = Batch(slots=3, ttft_seconds=0.0)
    running = [request() for _ in range(3)]
    for asked in running:
        batch.add(asked, now=0.0)
    assert sorted(asked.slot for asked in running) == [0, 1, 2]
    batch.remove(running[1], now=0.0)
    late = request()
    batch.add(late, now=0.0)
    assert late.slot == 1


def test_remove_is_harmless_for_a_request_that_is_not_there() -> None:
    batch, waiting = Batch(slots=1, ttft_seconds=0.0), request()
    batch.add(request(), now=0.0)
    batch.add(waiting, now=0.0)
    for _ in range(2):
        batch.remove(waiting, now=0.0)
    assert (batch.running, batch.waiting) == (1, 0)


def test_prefills_wait_for_nobody_while_something_decodes() -> None:
    batch, first = Batch(slots=2, ttft_seconds=1.0), request()
    batch.add(first, now=0.0)
    batch.step(one, now=1.0)
    batch.add(request(), now=1.0)
    assert batch.prefill_until() is None
    assert batch.step(one, now=1.5) == [first]


@contextlib.asynccontextmanager
async def running(**settings: float) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(
        slots=int(settings.get("slots", 4)),
        ttft_seconds=settings.get("ttft_seconds", 0.0),
        token_seconds=settings.get("token_seconds", 0.0),
        make_token=lambda request: len(request.tokens),
    )
    task = asyncio.create_task(scheduler.run())
    scheduler.resume()
    try:
        yield scheduler
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def collect(scheduler: Scheduler, max_tokens: int) -> list[int]:
    generation = scheduler.submit([1], max_tokens=max_tokens)
    found: list[int] = []
    try:
        while new := await generation.pull():
            found += new
    finally:
        generation.close()
    return found


async def test_requests_run_together_and_more_than_there_are_slots_wait() -> None:
    async with running(slots=2) as scheduler, asyncio.timeout(5):
        found = await asyncio.gather(*(collect(scheduler, 10) for _ in range(5)))
        assert found == [list(range(10))] * 5
        assert not scheduler.busy
        assert scheduler.usage == 0.0
        assert 30 <= scheduler.steps <= 40  # three rounds of ten, however the rounds overlap


async def test_the_pace_is_one_step_for_all() -> None:
    async with running(slots=64, ttft_seconds=20 * MS, token_seconds=2 * MS) as scheduler, asyncio.timeout(10):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(collect(scheduler, 50) for _ in range(64)))
        assert loop.time() - began >= 20 * MS + 49 * 2 * MS - MS
        assert scheduler.steps <= 70  # not 64 times as many


async def test_a_long_prefill_takes_steps() -> None:
    async with running(ttft_seconds=60.0) as scheduler, asyncio.timeout(5):
        generation = scheduler.submit([1], max_tokens=1)
        while scheduler.steps < 3:
            assert scheduler.busy
            await asyncio.sleep(0)
        generation.close()
        assert not scheduler.busy


async def test_pause_stops_steps_and_resume_goes_on_where_it_was() -> None:
    async with running() as scheduler, asyncio.timeout(5):
        generation = scheduler.submit([1], max_tokens=100_000)
        await generation.pull()
        scheduler.pause()
        steps = scheduler.steps
        assert not scheduler.busy
        for _ in range(20):
            await asyncio.sleep(0)
        assert scheduler.steps == steps
        scheduler.resume()
        made = len(generation.request.tokens)
        await generation.pull()
        assert len(generation.request.tokens) > made
        generation.close()


async def test_closing_ends_a_pull_that_waits() -> None:
    async with running(ttft_seconds=60.0) as scheduler, asyncio.timeout(5):
        generation = scheduler.submit([1], max_tokens=1)
        waiting = asyncio.create_task(generation.pull())
        await asyncio.sleep(0)
        generation.close()
        assert await waiting == []


async def test_a_cancelled_request_frees_its_slot() -> None:
    async with running(slots=1, ttft_seconds=60.0) as scheduler, asyncio.timeout(5):
        task = asyncio.create_task(collect(scheduler, 1))
        await asyncio.sleep(0)
        assert scheduler.usage == 1.0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scheduler.usage == 0.0


async def test_a_step_that_fails_ends_every_request_and_later_ones_too() -> None:
    def broken(request: SimRequest) -> int:
        raise EngineDeadError("broken")

    scheduler = Scheduler(slots=2, ttft_seconds=0.0, token_seconds=0.0, make_token=broken)
    scheduler.resume()
    async with asyncio.timeout(5):
        pulls = [asyncio.create_task(collect(scheduler, 5)) for _ in range(3)]
        await asyncio.sleep(0)
        await scheduler.run()
        for pull in (*pulls, asyncio.create_task(collect(scheduler, 5))):
            with pytest.raises(EngineDeadError, match="broken"):
                await pull
    assert isinstance(scheduler.failure, EngineDeadError)
    scheduler.resume()
    scheduler.submit([1], max_tokens=1)
    assert not scheduler.busy


async def test_a_stall_makes_no_step_while_it_is_busy() -> None:
    async with running() as scheduler, asyncio.timeout(5):
        scheduler.stall()
        generation = scheduler.submit([1], max_tokens=5)
        for _ in range(20):
            await asyncio.sleep(0)
        assert scheduler.busy
        assert scheduler.steps == 0
        generation.close()
