"""Five thousand slow streams through one gateway process: none is lost, every byte is right, and memory is measured."""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.gateway.client import Answer, Client
from tests.process.gateway.conftest import ready
from tests.process.gateway.light_worker import expected
from tests.support.processes import Process

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WANTED = 5000
EVENTS = 8
SECONDS = 0.5
"""Between two events of a stream, once all have begun."""
CONNECTING = 200
"""How many connect and ask at a time."""
SPARE_FILES = 200


@pytest.fixture
def streams() -> Iterator[int]:
    """All of them, or none: the gateway needs two open files for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * WANTED + SPARE_FILES:
        pytest.skip(f"{WANTED} streams need {2 * WANTED + SPARE_FILES} open files, and `ulimit -Hn` is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield WANTED
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory_kib(pid: int) -> int:
    """Memory that is the process's own."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise AssertionError("no Pss")


async def test_many_slow_streams(start_gateway: Callable[..., Process], streams: int) -> None:
    gateway = start_gateway("--max-inflight", str(streams + 10), "--drain-timeout-seconds", "20", "--no-access-log")
    port = await ready(gateway)
    clients = [Client(port) for _ in range(streams)]
    loop = asyncio.get_running_loop()
    firsts: list[asyncio.Future[None]] = [loop.create_future() for _ in clients]
    turns = asyncio.Semaphore(CONNECTING)
    bodies = [
        {"model": "light", "id": f"s{number}", "stream": True, "events": EVENTS, "seconds": SECONDS, "barrier": streams}
        for number in range(streams)
    ]

    async def one(number: int) -> Answer:
        async with turns:
            await clients[number].connect()
        return await clients[number].ask(bodies[number], firsts[number])

    before = memory_kib(gateway.pid)
    began = time.monotonic()
    async with asyncio.timeout(90):
        asked = [asyncio.create_task(one(number)) for number in range(streams)]
        await asyncio.gather(*firsts)  # all of them are under way now: none goes on before the last has begun
        held = memory_kib(gateway.pid)
        opened = time.monotonic()
        answers = await asyncio.gather(*asked)
    ended = time.monotonic()
    wrong = [
        f"{body['id']}: {answer.status}, {'complete' if answer.complete else 'cut'}, {answer.body[-200:]!r}"
        for body, answer in zip(bodies, answers, strict=True)
        if not (answer.complete and answer.status == 200 and answer.body == expected(body))
    ]
    print(
        f"{streams} streams at a time: "
        f"{opened - began:.1f} s to open, {ended - opened:.1f} s for {streams * EVENTS} events, {len(wrong)} wrong, "
        f"{(held - before) / streams:.1f} KiB of the gateway's memory for each"
    )
    assert not wrong, wrong[:5]
    assert (held - before) / streams < 64
    for client in clients:
        client.close()
    gateway.signal(signal.SIGTERM)
    assert await asyncio.to_thread(gateway.wait) == 0
