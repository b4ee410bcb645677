"""SIGTERM while many clients ask: nobody who was admitted loses an answer, in any of twenty rounds."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.process.gateway.client import Answer, Client
from tests.process.gateway.conftest import ready
from tests.process.gateway.light_worker import expected
from tests.support.processes import Process

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

ROUNDS = 20
AT_A_TIME = 4
CONNECTIONS = 24


@dataclass
class Round:
    number: int
    process: Process
    port: int
    signalled_at: float = 0.0
    answers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def client(self, number: int, enough: asyncio.Event, wanted: int) -> None:
        """Ask again and again, on one connection while it lasts, until nobody listens any more."""
        client = Client(self.port)
        asked = 0
        try:
            while True:
                if not client.connected:
                    try:
                        await client.connect()
                    except ConnectionError:
                        if not self.signalled_at:
                            self.faults.append(f"client {number}: refused before the signal")
                        self.outcomes["refused"] += 1
                        return
                name = f"r{self.number}-c{number}-{asked}"
                body = {"model": "light", "id": name, "seconds": 0.01}
                if number % 2:
                    body |= {"stream": True, "events": 5 + number % 7}
                answer = await client.ask(body)
                asked += 1
                self.outcomes[self.judge(name, answer, expected(body))] += 1
                self.answers += 1
                if self.answers == wanted:
                    enough.set()
                if answer.status == 503:
                    await asyncio.sleep(0.02)  # as a client that obeys would, and then finds another gateway
        finally:
            client.close()

    def judge(self, name: str, answer: Answer, right: bytes) -> str:
        after = self.signalled_at and answer.asked_at > self.signalled_at
        if answer.complete and answer.status == 200 and answer.body == right:
            return "right"
        if answer.complete and answer.status == 503 and self.signalled_at and is_draining(answer):
            return "draining"
        if after and not answer.touched:
            return "closed"  # it came when all was over
        self.faults.append(f"{name}: {answer.status} {'complete' if answer.complete else 'cut'} {answer.body[:200]!r}")
        return "wrong"

    async def run(self) -> None:
        wanted = random.Random(self.number).randint(CONNECTIONS, 12 * CONNECTIONS)
        enough = asyncio.Event()
        async with asyncio.timeout(30), asyncio.TaskGroup() as clients:
            for number in range(CONNECTIONS):
                clients.create_task(self.client(number, enough, wanted))
            await enough.wait()
            self.signalled_at = time.monotonic()
            for _ in range(2):  # what was asked before is written by the end of the loop's turn
                await asyncio.sleep(0)
            self.process.signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait)
        if code != 0:
            self.faults.append(f"exit code {code}")
        if "cut=0" not in self.process.output():
            self.faults.append(f"something was cut: {self.process.output()[-2000:]}")


def is_draining(answer: Answer) -> bool:
    says_when = int(answer.headers.get("retry-after", 0)) >= 1
    return b'"code":"draining"' in answer.body and answer.headers.get("connection") == "close" and says_when


async def test_sigterm_under_load(start_gateway: Callable[..., Process]) -> None:
    total: Counter[str] = Counter()
    waiting = list(range(ROUNDS))

    async def rounds() -> None:
        while waiting:
            number = waiting.pop(0)
            process = start_gateway("--drain-timeout-seconds", "20")
            one = Round(number, process, await ready(process))
            await one.run()
            assert not one.faults, f"round {number}: {one.faults[:5]} of {one.outcomes}"
            assert one.outcomes["right"] >= CONNECTIONS
            total.update(one.outcomes)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(rounds())
    print(f"{ROUNDS} rounds of {CONNECTIONS} connections: {dict(total)}")
    assert total["draining"] > ROUNDS  # so the signal did come while they asked
    assert total["refused"] + total["closed"] >= ROUNDS * CONNECTIONS
