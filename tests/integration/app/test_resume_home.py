"""An answer whose worker broke waits for that worker's spare, where its KV cache may be, though another has room."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.integration.app.conftest import PATIENCE_SECONDS, Running, run_gateway, until
from tests.integration.app.fake_worker import FakeWorker
from tests.integration.app.generating import Story, is_resume, refuses

STORY = Story()
LONG = 60.0
"""Longer than a request waits in these tests: what ends the wait for the spare is not its time."""


async def begun(running: Running, worker: FakeWorker) -> asyncio.Task[bytes]:
    """A stream of which two units came."""
    worker.will(STORY.told(wait=2))
    pieces: list[bytes] = []
    two_came = asyncio.Event()

    async def hear() -> bytes:
        async with running.stream() as answer:
            async for piece in answer.aiter_raw():
                pieces.append(piece)
                if b"".join(pieces).startswith(b"".join(STORY.units[:2])):
                    two_came.set()
        return b"".join(pieces).replace(b": keep-alive\n\n", b"")

    hearing = asyncio.create_task(hear())
    async with asyncio.timeout(5):
        await two_came.wait()
    return hearing


async def broken(running: Running, worker: FakeWorker) -> asyncio.Task[bytes]:
    """Such a stream, and its worker is gone."""
    hearing = await begun(running, worker)
    await worker.die()
    return hearing


async def promote(worker: FakeWorker) -> None:
    """The spare takes over."""
    worker.epoch(worker.line.epoch + 1)
    await worker.start()


async def test_it_goes_on_at_the_spare_of_its_own_worker(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    async with run_gateway(one, two, resume_home_seconds=LONG, resume_wait_seconds=LONG) as running:
        hearing = await broken(running, one)
        await until(lambda: len(running.gateway.registry.candidates("")) == 1)  # the death is known, pod-1 has room
        assert not two.calls
        one.default = STORY.told()
        await promote(one)
        assert await hearing == STORY.stream
        assert [is_resume(call) for call in one.calls] == [False, True]
        assert not two.calls


async def test_new_requests_do_not_wait_for_the_spare(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    two.default = STORY.told()
    async with run_gateway(one, two, resume_home_seconds=LONG, resume_wait_seconds=LONG) as running:
        hearing = await broken(running, one)
        assert (await running.chat(stream=True)).content == STORY.stream
        assert len(two.calls) == 1
        assert not hearing.done()
        one.default = STORY.told()
        await promote(one)
        assert await hearing == STORY.stream


async def test_without_a_promotion_it_goes_elsewhere_when_the_time_is_over(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    two.default = STORY.told()
    async with run_gateway(one, two, resume_home_seconds=0.3, resume_wait_seconds=LONG) as running:
        hearing = await begun(running, one)
        died_at = time.monotonic()
        await one.die()
        assert await hearing == STORY.stream
        assert 0.25 < time.monotonic() - died_at < PATIENCE_SECONDS
        assert [is_resume(call) for call in two.calls] == [True]


async def test_whose_worker_had_no_spare_goes_elsewhere_at_once(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.say(standby=None)
    two.default = STORY.told()
    async with run_gateway(one, two, resume_home_seconds=LONG, resume_wait_seconds=LONG) as running:
        async with asyncio.timeout(5):
            assert await (await broken(running, one)) == STORY.stream
        assert [is_resume(call) for call in two.calls] == [True]


async def test_a_worker_that_lives_on_is_not_waited_for(workers: Any) -> None:
    """Only a connection broke: its watch speaks on."""
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(cut=2, reset=True))
    two.default = STORY.told()
    one.default = STORY.told()
    async with run_gateway(one, two, resume_home_seconds=LONG, resume_wait_seconds=LONG) as running:
        async with asyncio.timeout(5):
            assert (await running.chat(stream=True)).content == STORY.stream
        assert sum(is_resume(call) for call in (*one.calls, *two.calls)) == 1


async def test_a_spare_that_would_not_go_on_is_left_for_another(workers: Any) -> None:
    """Of a whole answer, of which the client has seen nothing: it is made anew, wherever there is room."""
    one, two = await workers("pod-0", "pod-1")
    one.will(STORY.told(wait=2), refuses())
    one.default = two.default = STORY.told()
    async with run_gateway(one, two, resume_home_seconds=LONG, resume_wait_seconds=LONG) as running:
        asking = asyncio.create_task(running.chat())
        await one.call()
        await one.die()
        await promote(one)
        answer = await asking
        assert answer.content == STORY.document
        assert is_resume(one.calls[1])
        assert len(one.calls) + len(two.calls) == 3
