"""More requests than the workers have room for."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.integration.app.conftest import Running, one_shell, read_response, run_gateway, until
from tests.integration.app.fake_worker import MODEL, Call, FakeWorker, answers, hangs, reselects
from workers.serving import ROOM_SECONDS

pytestmark = one_shell


class Gate:
    """A worker's gate as the real one is: counts, refuses what is over capacity, and tells of room."""

    def __init__(self, worker: FakeWorker, seconds: float) -> None:
        self.worker = worker
        self.seconds = seconds
        self.inflight = self.most = self.refused = self.served = 0
        self.from_whom: Counter[str] = Counter()
        self.go = asyncio.Event()
        self.go.set()
        self._news: asyncio.TimerHandle | None = None
        worker.default = self

    def _line(self) -> dict[str, int]:
        return {"inflight": self.inflight, "refused": self.refused, "gateways": self.worker.watches_opened}

    async def __call__(self, call: Call) -> None:
        if self.inflight >= self.worker.line.capacity:
            self.refused += 1
            await reselects()(call)
            return
        self.inflight += 1
        self.most = max(self.most, self.inflight)
        self.worker.line = msgspec.structs.replace(self.worker.line, **self._line())
        try:
            await self.work(call)
        finally:
            self.inflight -= 1
            self.worker.line = msgspec.structs.replace(self.worker.line, **self._line())
            if self._news is None:
                self._news = asyncio.get_running_loop().call_later(ROOM_SECONDS, self._tell)

    async def work(self, call: Call) -> None:
        await self.go.wait()
        await asyncio.sleep(self.seconds * random.uniform(0.5, 1.5))
        self.served += 1
        self.from_whom[call.json["messages"][0]["content"]] += 1
        await answers()(call)

    def _tell(self) -> None:
        self._news = None
        self.worker.say(**self._line())


def known(running: Running, *workers: FakeWorker) -> Callable[[], bool]:
    return lambda: len(running.gateway.registry.candidates("")) == len(workers)


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        found: str = json.loads(self.body)["error"]["code"]
        return found


async def ask(running: Running, whom: str = "") -> Answer:
    """On a connection of its own; hundreds at a time cost little."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": whom}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await running.raw(head.encode() + body)
    try:
        return Answer(*await read_response(reader))
    finally:
        writer.transport.abort()


async def test_hundreds_wait_and_none_is_refused_by_a_worker(workers: Any) -> None:
    """One gateway knows what it has sent: it never asks in vain, and a place is used again at once."""
    gates = [
        Gate(worker, 0.02) for capacity in range(1, 5) for worker in await workers(f"pod-{capacity}", capacity=capacity)
    ]
    async with run_gateway(*(gate.worker for gate in gates), wait_for_worker_seconds=30) as running:
        await running.until(known(running, *(gate.worker for gate in gates)))
        all_answers = await asyncio.gather(*(ask(running) for _ in range(300)))
        assert {answer.status_code for answer in all_answers} == {200}
        assert [gate.refused for gate in gates] == [0, 0, 0, 0]
        assert all(0 < gate.most <= gate.worker.line.capacity for gate in gates)
        assert [replica.room.own for replica in running.gateway.registry.candidates("")] == [0, 0, 0, 0]
        text = (await running.client.get("/metrics")).text
        assert "hotspare_queued_requests 0.0" in text
        assert 200 < float(text.partition("hotspare_queue_wait_seconds_count ")[2].partition("\n")[0]) <= 300


async def test_beyond_the_line_429_at_once(workers: Any) -> None:
    (worker,) = await workers("pod-0", capacity=2)
    worker.default = hangs
    async with run_gateway(worker, max_queued=3) as running:
        await running.until(known(running, worker))
        asked = [asyncio.create_task(ask(running)) for _ in range(5)]
        await running.until(lambda: running.gateway.queue.waiting == 3)
        refused = await ask(running)
        assert (refused.status_code, refused.code) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 100
        assert (await running.client.get("/status")).json()["waiting"] == 3
        text = (await running.client.get("/metrics")).text
        assert "hotspare_queued_requests 3.0" in text
        assert 'hotspare_refused_requests_total{reason="queue_full"} 1.0' in text
        worker.default = answers()
        for number in range(2):
            (await worker.call(number)).go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_hung_worker_holds_up_nobody_else(workers: Any) -> None:
    hung, well = await workers("pod-0", "pod-1", capacity=4)
    hung.default = hangs
    gate = Gate(well, 0.01)
    async with run_gateway(hung, well) as running:
        await running.until(known(running, hung, well))
        asked = [asyncio.create_task(ask(running)) for _ in range(60)]
        await running.until(lambda: sum(task.done() for task in asked) == 56)
        assert (len(hung.calls), gate.served) == (4, 56)
        for call in hung.calls:
            call.go.set()
        await asyncio.gather(*asked)


async def test_a_slow_worker_gets_no_more_than_its_room(workers: Any) -> None:
    slow, fast = await workers("pod-0", "pod-1", capacity=4)
    gates = [Gate(slow, 0.6), Gate(fast, 0.01)]
    async with run_gateway(slow, fast) as running:
        await running.until(known(running, slow, fast))
        await asyncio.gather(*(ask(running) for _ in range(150)))
        assert max(gate.most for gate in gates) <= 4
        assert gates[1].served > 2 * gates[0].served
        assert [gate.refused for gate in gates] == [0, 0]


async def test_equal_workers_get_the_same(workers: Any) -> None:
    gates = [Gate(worker, 0.001) for worker in await workers("pod-0", "pod-1", "pod-2", capacity=8)]
    async with run_gateway(*(gate.worker for gate in gates)) as running:
        await running.until(known(running, *(gate.worker for gate in gates)))
        for _ in range(20):
            await asyncio.gather(*(ask(running) for _ in range(6)))
        assert [gate.served for gate in gates] == [40, 40, 40]


async def test_a_full_model_holds_up_no_other(workers: Any) -> None:
    (full,) = await workers("pod-0", models=(MODEL,), capacity=1)
    (other,) = await workers("pod-1", models=("other",), capacity=1)
    full.default = hangs
    async with run_gateway(full, other, max_queued=8) as running:
        await running.until(known(running, full, other))
        asked = [asyncio.create_task(ask(running)) for _ in range(9)]
        await running.until(lambda: running.gateway.queue.waiting == 8)
        for _ in range(5):
            assert (await running.chat(model="other")).status_code == 200
        full.default = answers()
        (await full.call()).go.set()
        await asyncio.gather(*asked)


async def test_a_client_that_leaves_gives_its_place_back(workers: Any) -> None:
    (worker,) = await workers("pod-0", capacity=1)
    worker.will(hangs, hangs)
    async with run_gateway(worker) as running:
        await running.until(known(running, worker))
        _, first = await running.raw_chat(stream=True)
        await worker.call()
        _, queued = await running.raw_chat(stream=False)
        await running.until(lambda: running.gateway.queue.waiting == 1)
        asked = asyncio.create_task(running.chat())
        await running.until(lambda: running.gateway.queue.waiting == 2)
        queued.transport.abort()
        await running.until(lambda: running.gateway.queue.waiting == 1)
        first.transport.abort()
        (await worker.call(1)).go.set()
        assert (await asked).status_code == 200
        (replica,) = running.gateway.registry.candidates("")
        assert replica.room.own == 0


async def test_two_gateways_share_a_worker(workers: Any) -> None:
    """Both always want more than half: both are served all the time, and the worker is kept busy."""
    (worker,) = await workers("pod-0", capacity=4)
    worker.heartbeat = False
    gate = Gate(worker, 0.03)
    stop = asyncio.Event()

    async def client(running: Running, whom: str) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not stop.is_set():
            statuses[(await ask(running, whom)).status_code] += 1
        return statuses

    async with run_gateway(worker) as one, run_gateway(worker) as two:
        await one.until(known(one, worker))
        await two.until(known(two, worker))
        clients = [asyncio.create_task(client(one, "one")) for _ in range(12)]
        await until(lambda: gate.served >= 20, 10)
        clients += [asyncio.create_task(client(two, "two")) for _ in range(12)]
        before = gate.served
        await until(lambda: gate.served >= before + 200, 20)
        stop.set()
        statuses = sum(await asyncio.gather(*clients), Counter())
    assert set(statuses) == {200}
    assert gate.most == 4
    assert gate.from_whom["two"] > 50, gate.from_whom
    assert gate.refused < gate.served / 2, (gate.refused, gate.served)


async def test_clients_that_obey_find_room(workers: Any) -> None:
    """Three times as many as there is room for, places and line together; each comes back when it is told to."""
    (worker,) = await workers("pod-0", capacity=4)
    gate = Gate(worker, 0.04)
    returns: Counter[int] = Counter()

    async def client(running: Running) -> None:
        told = False
        while gate.served < 250:
            answer = await ask(running)
            if told and gate.served > 80:
                returns[answer.status_code] += 1
            told = answer.status_code == 429
            if told:
                await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1000)

    async with run_gateway(worker, max_queued=8) as running:
        await running.until(known(running, worker))
        await asyncio.gather(*(client(running) for _ in range(36)))
    assert set(returns) <= {200, 429}
    assert returns[200] > 20
    assert returns[200] > returns[429], returns


async def test_a_drain_serves_what_waits(workers: Any) -> None:
    (worker,) = await workers("pod-0", capacity=2)
    gate = Gate(worker, 0.02)
    gate.go.clear()
    async with run_gateway(worker, drain_timeout_seconds=10) as running:
        await running.until(known(running, worker))
        asked = [asyncio.create_task(ask(running)) for _ in range(12)]
        await running.until(lambda: running.gateway.queue.waiting == 10)
        running.server.request_drain()
        late = await ask(running)
        assert (late.status_code, late.code) == (503, "draining")
        assert late.headers["retry-after"] == "1"
        gate.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        async with asyncio.timeout(5):
            await running.task
        assert (gate.served, gate.refused, running.server.exit_code) == (12, 0, 0)
