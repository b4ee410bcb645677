"""The sim with an accelerator's time: what steps are made of, how long they take, and who waits for room."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.workers.test_sim_engine import Client, engine
from workers.engines.sim.accelerator import Accelerator
from workers.engines.sim.batch import Batch, SimRequest
from workers.engines.sim.prefixes import BLOCK_TOKENS, Prefixes
from workers.engines.sim.scheduler import Scheduler

MS = 0.001
TIMES = Accelerator(
    prefill_tokens_per_second=100.0,
    step_seconds=1.0,
    sequence_seconds=0.1,
    context_token_seconds=0.01,
    chunk_tokens=50,
    kv_tokens=0,
)


def request(prompt: int, answer: int = 3, generated: int = 0) -> SimRequest:
    return SimRequest(
        digest=1, prompt_tokens=prompt, max_tokens=answer, generated=[0] * generated, prompt=list(range(prompt))
    )


def one(request: SimRequest) -> int:
    return 1


def batch_of(*requests: SimRequest, slots: int = 8, **changes: float) -> Batch:
    accelerator = msgspec.structs.replace(TIMES, **changes)
    batch = Batch(slots=slots, ttft_seconds=99.0, accelerator=accelerator)
    for asked in requests:
        batch.add(asked, now=0.0)
    return batch


def step(batch: Batch, accelerator: Accelerator = TIMES) -> tuple[float, list[SimRequest]]:
    composed = batch.compose(accelerator)
    return composed.seconds, batch.finish(composed, one, now=0.0)


def test_a_step_takes_the_sum_of_its_parts() -> None:
    assert TIMES.seconds(sequences=0, context_tokens=0, prefill_tokens=0) == 1.0
    assert TIMES.seconds(sequences=2, context_tokens=30, prefill_tokens=50) == pytest.approx(1.0 + 0.2 + 0.3 + 0.5)


def test_a_prefill_takes_as_many_steps_as_it_has_chunks_and_the_last_one_gives_the_first_token() -> None:
    asked = request(120)
    batch = batch_of(asked)
    assert step(batch) == (1.5, [])
    assert step(batch) == (1.5, [])
    assert step(batch) == (1.2, [asked])
    assert step(batch)[0] == pytest.approx(1.0 + 0.1 + 1.21)
    assert batch.work.prefilled_tokens == 120


def test_prefills_share_the_chunk_in_order_of_arrival_and_decodes_go_on_beside_them() -> None:
    first, second, third = request(10, 9), request(30), request(70)
    batch = batch_of(first)
    step(batch)
    batch.add(second, now=0.0)
    batch.add(third, now=0.0)
    assert step(batch) == (pytest.approx(1.0 + 0.1 + 0.11 + 0.5), [first, second])
    assert third.to_compute == 50
    assert step(batch)[1] == [first, second, third]


def test_who_comes_while_a_step_is_under_way_has_no_part_in_it() -> None:
    first, late = request(10), request(10)
    batch = batch_of(first)
    composed = batch.compose(TIMES)
    batch.add(late, now=0.0)
    batch.remove(first, now=0.0)
    assert batch.finish(composed, one, now=0.0) == []
    assert (first.tokens, late.to_compute) == ([], 10)


def test_what_does_not_fit_into_the_kv_cache_waits_also_if_a_slot_is_free() -> None:
    first, second, small = request(60, 40), request(80, 20), request(1, 1)
    batch = batch_of(first, second, small, kv_tokens=199)
    assert (batch.running, batch.waiting, batch.kv_tokens) == (1, 2, 100)  # in order: the small one waits, too
    batch.remove(first, now=0.0)
    assert (batch.running, batch.waiting, batch.kv_tokens) == (2, 0, 102)


def test_one_that_is_larger_than_the_kv_cache_runs_alone() -> None:
    large, other = request(500), request(5)
    batch = batch_of(large, other, kv_tokens=100)
    assert (batch.running, batch.waiting) == (1, 1)


def test_what_the_prefix_cache_has_is_not_prefilled() -> None:
    cache = Prefixes(slots=1)
    batch = Batch(slots=1, ttft_seconds=0.0, prefixes=cache, accelerator=TIMES)
    first, again = request(5 * BLOCK_TOKENS), request(5 * BLOCK_TOKENS + 7)
    batch.add(first, now=0.0)
    for place, held in list(cache.due(first)):
        cache.publish(place, held, now=0.0)
    batch.remove(first, now=0.0)
    batch.add(again, now=0.0)
    assert (again.cached, again.to_compute) == (5 * BLOCK_TOKENS, 7)
    assert batch.work.cached_tokens == 5 * BLOCK_TOKENS


def test_an_answer_that_is_gone_on_with_is_prefilled_with_what_it_has_and_counted_apart() -> None:
    batch = batch_of(request(20, 40, generated=25), request(5))
    step(batch)
    assert (batch.work.prefilled_tokens, batch.work.prefilled_again_tokens) == (50, 45)


def test_a_preempted_request_is_prefilled_again() -> None:
    asked = request(20, 40)
    batch = batch_of(asked)
    for _ in range(4):
        step(batch)
    batch.recompute(now=0.0)
    batch.go_on(now=0.0)
    assert asked.to_compute == 20 + 4


def test_free_slots_are_a_deque_that_others_hold() -> None:
    assert isinstance(batch_of().free, deque)


@contextlib.asynccontextmanager
async def running(accelerator: Accelerator) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(
        slots=4,
        ttft_seconds=99.0,
        token_seconds=99.0,
        make_token=lambda asked: len(asked.tokens),
        accelerator=accelerator,
    )
    task = asyncio.create_task(scheduler.run())
    scheduler.resume()
    try:
        async with asyncio.timeout(10):
            yield scheduler
    finally:
        task.cancel()
        await asyncio.wait((task,))


QUICK = msgspec.structs.replace(
    TIMES, prefill_tokens_per_second=10_000.0, step_seconds=2 * MS, sequence_seconds=0.0, context_token_seconds=0.0
)


async def test_the_clock_holds_the_times() -> None:
    async with running(QUICK) as scheduler:
        loop = asyncio.get_running_loop()
        began = loop.time()
        generation = scheduler.submit(list(range(100)), max_tokens=50)
        found = await generation.pull()
        assert loop.time() - began >= 2 * 2 * MS + 10 * MS - MS
        while new := await generation.pull():
            found += new
        assert found == list(range(50))
        assert scheduler.work.steps == 51
        assert scheduler.work.wanted_seconds == pytest.approx(51 * 2 * MS + 10 * MS)
        assert scheduler.work.took_seconds >= scheduler.work.wanted_seconds - 1e-9
        assert not scheduler.busy


async def test_a_step_that_a_pause_meets_comes_to_nothing() -> None:
    slow = msgspec.structs.replace(QUICK, step_seconds=20 * MS)
    async with running(slow) as scheduler:
        generation = scheduler.submit([1], max_tokens=5)
        await generation.pull()
        await asyncio.sleep(0)
        scheduler.pause()
        made, steps = len(generation.request.tokens), scheduler.steps
        scheduler.recompute()
        scheduler.resume()
        assert len(generation.request.tokens) == made
        await generation.pull()
        assert scheduler.work.prefilled_again_tokens == 1 + made
        assert scheduler.steps > steps
        generation.close()


async def test_a_step_that_fails_ends_every_request() -> None:
    scheduler = Scheduler(
        slots=1, ttft_seconds=0.0, token_seconds=0.0, make_token=lambda asked: 1 // 0, accelerator=QUICK
    )
    scheduler.resume()
    scheduler.submit([1], max_tokens=5)
    async with asyncio.timeout(5):
        await scheduler.run()
    assert isinstance(scheduler.failure, ZeroDivisionError)


async def test_the_engine_tells_what_its_accelerator_did(tmp_path: Path) -> None:
    async with engine(tmp_path, prefill_tokens_per_second=1e6, step_seconds=0.0) as made:
        await Client(made, "/v1/completions", {"prompt": [65] * 40, "max_tokens": 4})()
        answer = await Client(made, "/accelerator", method="GET")()
        assert answer.status == 200
        told = answer.json
        assert (told["epoch"], told["prefilled_tokens"], told["steps"]) == (1, 40, 4)
        assert (told["running"], told["waiting"], told["kv_tokens"]) == (0, 0, 0)


async def test_without_a_simulated_accelerator_there_is_nothing_to_tell(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        assert (await Client(made, "/accelerator", method="GET")()).status == 404
