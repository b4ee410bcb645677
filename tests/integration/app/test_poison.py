"""A request that kills every engine that takes it, and those that die beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.telemetry.access_log import AccessLog
from tests.integration.app.conftest import Running, one_shell, run_gateway
from tests.integration.app.fake_worker import MODEL, Behaviour, Call, FakeWorker
from tests.integration.app.generating import Story, is_resume
from tests.integration.app.test_resume import error_of, sample

STORY = Story()
POISON = b"kill"


class Pod:
    """Its engine dies of what contains the poison, with everything it has, and its shadow takes over."""

    def __init__(self, worker: FakeWorker, otherwise: Behaviour) -> None:
        self.worker = worker
        self.deaths = 0
        self.alone: list[int] = []
        """How many other requests the engine had at each death."""
        self._killed = asyncio.Event()
        self._otherwise = otherwise
        self._running = 0
        worker.default = self._behave

    async def _behave(self, call: Call) -> None:
        self._running += 1
        try:
            if POISON in call.body:
                self.alone.append(self._running - 1)
                self._killed.set()
                await call.closed.wait()
            else:
                await self._otherwise(call)
        finally:
            self._running -= 1

    async def live(self) -> None:
        while True:
            await self._killed.wait()
            await self.worker.die()
            self._killed.clear()
            self.deaths += 1
            self.worker.epoch(self.worker.line.epoch + 1)
            await self.worker.start()


@asynccontextmanager
async def pods(*workers: FakeWorker, otherwise: Behaviour | None = None) -> AsyncIterator[list[Pod]]:
    found = [Pod(worker, otherwise or STORY.told()) for worker in workers]
    tasks = [asyncio.create_task(pod.live()) for pod in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def poison(running: Running, *, stream: bool = False) -> Any:
    return await running.chat(stream=stream, stop=POISON.decode())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_five_engines_and_no_more(
    workers: Any, stream: bool, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    started = await workers(*(f"pod-{number}" for number in range(count)))
    async with pods(*started) as found, run_gateway(*started) as running:
        answer = await poison(running, stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_kills_worker")
        assert answer.headers["x-should-retry"] == "false"
        assert sum(pod.deaths for pod in found) == 5  # three of them while it was the only suspect
        written: list[bytes] = []
        running.gateway.intake.accounts.access_log = AccessLog(written.append, "json")
        again = await poison(running, stream=stream)
        assert (again.status_code, again.json()["error"]["code"]) == (500, "request_kills_worker")
        assert (await running.chat(stream=True)).content == STORY.stream  # others are not meant
        assert sum(pod.deaths for pod in found) == 5
        assert sum(len(pod.worker.calls) for pod in found) == 6
        assert "refused without being tried" in again.json()["error"]["message"]
        line = json.loads(written[0])
        assert (line["repeated"], line["error"]) == (True, "request_kills_worker")
        assert "lost" not in line  # it was not this one that killed somebody
        assert any("kills workers, and is refused from now on" in said for said in caplog.messages)
        assert await sample(running, "hotspare_lost_requests_total", 'reason="poison"') == 1


@one_shell
async def test_within_a_stream_it_is_an_error_event(workers: Any) -> None:
    """Two units come, and then each engine dies at once."""
    (worker,) = await workers("pod-0")

    async def killed_later(call: Call) -> None:
        if not is_resume(call):
            await STORY.told(wait=2)(call)

    async with pods(worker) as (pod,), run_gateway(worker) as running:
        worker.will(killed_later)
        async with running.stream(stop=POISON.decode()) as answer:
            seen = b""
            async for piece in answer.aiter_raw():
                seen += piece
                if seen == STORY.units[0] + STORY.units[1]:
                    pod._killed.set()  # the first death; it has made progress, and it does not count
        assert error_of(seen)["code"] == "request_kills_worker"
        assert "each one that went on with its answer" in error_of(seen)["message"]
        assert pod.deaths == 6


@one_shell
@pytest.mark.parametrize("count", [1, 2])
async def test_nobody_else_is_lost(workers: Any, count: int) -> None:
    started = await workers(*(f"pod-{number}" for number in range(count)))

    async def slowly(call: Call) -> None:
        await asyncio.sleep(0.02)  # it is in prefill for a moment, so that others die beside the poison
        await STORY.told()(call)

    async with pods(*started, otherwise=slowly) as found, run_gateway(*started) as running:
        others = [asyncio.create_task(running.chat(stream=number % 3 != 0)) for number in range(25)]
        bad = asyncio.create_task(poison(running, stream=True))
        others += [asyncio.create_task(running.chat(stream=number % 3 != 0)) for number in range(25)]
        assert (await bad).json()["error"]["code"] == "request_kills_worker"
        for answer in await asyncio.gather(*others):
            assert answer.content in (STORY.stream, STORY.document)
        # One more if its first try was on an idle connection: that its end was a death is known of new ones only.
        assert 5 <= (deaths := sum(pod.deaths for pod in found)) <= 6
        assert (await poison(running, stream=True)).status_code == 500
        assert sum(pod.deaths for pod in found) == deaths
        assert await sample(running, "hotspare_lost_requests_total") == 1


@one_shell
async def test_however_long_the_suspects_take(workers: Any) -> None:
    """Fifty of them, each for a tenth of a second, where a resume waits for one second."""
    started = await workers("pod-0", "pod-1")

    async def slowly(call: Call) -> None:
        await asyncio.sleep(0.1)
        await STORY.told()(call)

    async with pods(*started, otherwise=slowly) as found, run_gateway(*started, resume_wait_seconds=1) as running:
        others = [asyncio.create_task(running.chat(stream=number % 3 != 0)) for number in range(25)]
        bad = asyncio.create_task(poison(running, stream=True))
        others += [asyncio.create_task(running.chat(stream=number % 3 != 0)) for number in range(25)]
        assert (await bad).json()["error"]["code"] == "request_kills_worker"
        for answer in await asyncio.gather(*others):
            assert answer.content in (STORY.stream, STORY.document)
        assert 5 <= sum(pod.deaths for pod in found) <= 6
        assert await sample(running, "hotspare_lost_requests_total") == 1
        assert not len(running.gateway.relay.shared.ward.suspects)


@one_shell
@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_small_limit_does_not_let_the_guilty_go(workers: Any, limit: int) -> None:
    """Deaths are no matter of the limit of breaks."""
    started = await workers("pod-0", "pod-1")
    async with pods(*started) as found, run_gateway(*started, resume_limit=limit) as running:
        answer = await poison(running)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_kills_worker")
        assert sum(pod.deaths for pod in found) == 5


@one_shell
async def test_several_that_kill_are_all_convicted(workers: Any) -> None:
    started = await workers("pod-0", "pod-1", "pod-2")
    async with pods(*started), run_gateway(*started) as running:
        asked = [running.chat(stop=f"{POISON.decode()} {number}") for number in range(3)]
        answers = await asyncio.gather(*asked)
        assert {answer.json()["error"]["code"] for answer in answers} == {"request_kills_worker"}
        assert not len(running.gateway.relay.shared.ward.suspects)


@one_shell
async def test_a_network_that_breaks_is_nobodys_fault(workers: Any) -> None:
    """Connections break each time, the engine lives on: that is a lost worker, and the request may come again."""
    (worker,) = await workers("pod-0")

    async def breaks(call: Call) -> None:
        call.cut(reset=True)

    worker.default = breaks
    async with run_gateway(worker, wait_for_worker_seconds=10) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
        assert len(worker.calls) == 4
        worker.default = STORY.told()
        assert (await running.chat()).content == STORY.document


@one_shell
async def test_hand_overs_count_against_no_request(workers: Any) -> None:
    """However many it goes through without having gained anything."""
    from workers.contract import Role

    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        worker.default = STORY.told(wait=0)
        request = asyncio.create_task(
            running.client.post("/v1/chat/completions", json={"model": MODEL, "messages": []})
        )
        for number in range(2, 9):
            await worker.call(number - 2)
            worker.say(state=Role.HANDOVER)
            await running.until(lambda: not running.gateway.registry.candidates(""))
            await worker.die()
            worker.epoch(number)
            worker.say(state=Role.ACTIVE)
            if number == 8:
                worker.default = STORY.told()
            await worker.start()
        answer = await request
        assert answer.status_code == 200, answer.text
        assert not running.gateway.relay.shared.ward.refused.marks


@one_shell
async def test_an_engine_that_was_told_to_stop_has_not_been_killed(workers: Any) -> None:
    """It says that it drains, and takes its streams with it."""
    from workers.contract import Role

    (worker,) = await workers("pod-0")
    body = {"model": MODEL, "messages": []}
    async with run_gateway(worker) as running:
        for number in range(2, 6):
            worker.default = STORY.told(wait=0)
            if number == 2:
                request = asyncio.create_task(running.client.post("/v1/chat/completions", json=body))
            await worker.call(number - 2)
            worker.say(state=Role.DRAINING)
            await running.until(lambda: not running.gateway.registry.candidates(""))
            await worker.die()
            worker.epoch(number)
            worker.say(state=Role.ACTIVE)
            if number == 5:
                break
            await worker.start()
        answer = await request
        assert answer.json()["error"]["code"] == "worker_lost"
        assert not running.gateway.relay.shared.ward.refused.marks
