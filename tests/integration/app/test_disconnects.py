"""A client that leaves: wherever its request is, the gateway lets go of it within 50 ms."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.app.conftest import PATIENCE_SECONDS, Running, run_gateway
from tests.integration.app.fake_worker import (
    STREAM_HEAD,
    Behaviour,
    Call,
    event,
    hangs,
    head,
    reselects,
    streams_then_waits,
)

LIMIT_SECONDS = 0.05
TRIES = 5
"""The best one of them counts: it shows the way that the code takes, and a busy machine may be late."""


async def stops_after_head(call: Call) -> None:
    await call.send(STREAM_HEAD)
    await call.closed.wait()


async def stops_in_the_document(call: Call) -> None:
    await call.send(head(200, content_type="application/json", content_length=100) + b'{"id":')
    await call.closed.wait()


AT_THE_WORKER: dict[str, tuple[Behaviour, bool, bytes]] = {
    "prefill": (hangs, True, b""),
    "prefill of a whole answer": (hangs, False, b""),
    "after the head": (stops_after_head, True, b""),
    "in a whole answer": (stops_in_the_document, False, b""),
    "decode": (streams_then_waits(event("a")), True, event("a")),
}
"""What the worker does, whether a stream is asked for, and what the client has read when it leaves."""


@pytest.mark.parametrize("phase", AT_THE_WORKER)
async def test_it_ends_at_the_worker(workers: Any, phase: str) -> None:
    (worker,) = await workers("pod-0")
    behaviour, stream, seen = AT_THE_WORKER[phase]
    worker.will(*[behaviour] * TRIES)
    took = []
    async with run_gateway(worker) as running:
        for number in range(TRIES):
            reader, writer = await running.raw_chat(stream=stream)
            call = await worker.call(number)
            if seen:
                await reader.readuntil(seen)
            await running.read_all()  # what the worker has sent, too
            left_at = time.monotonic()
            writer.transport.abort()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.closed.wait()
            took.append(time.monotonic() - left_at)
            await running.until(lambda: running.gateway.admission.inflight == 0)
        assert min(took) <= LIMIT_SECONDS, took
        text = (await running.client.get("/metrics")).text
        assert f'hotspare_client_disconnects_total{{route="chat"}} {TRIES}.0' in text
        assert (await running.chat()).status_code == 200
        # The gateway broke those connections itself: no reason to suspect the worker.
        assert len(running.entry(worker).history) == 1


async def lets_go(running: Running, is_there: Callable[[int], bool]) -> None:
    """Ask, be where ``is_there`` says (it gets the number of the try), leave: the gateway forgets it in time."""
    took = []
    others = running.gateway.admission.inflight
    for number in range(TRIES):
        _, writer = await running.raw_chat(stream=True)
        await running.until(lambda n=number: is_there(n))
        left_at = time.monotonic()
        writer.transport.abort()
        await running.until(lambda: running.gateway.admission.inflight == others)
        took.append(time.monotonic() - left_at)
        assert running.gateway.queue.waiting == 0
    assert min(took) <= LIMIT_SECONDS, took


async def test_it_ends_in_line(workers: Any) -> None:
    """Behind a request that has the only place."""
    (worker,) = await workers("pod-0", capacity=1)
    worker.will(hangs)
    async with run_gateway(worker) as running, asyncio.timeout(20):
        await running.until(lambda: bool(running.gateway.registry.candidates("")))
        first = asyncio.create_task(running.chat())
        await worker.call()
        await lets_go(running, lambda _: running.gateway.queue.waiting == 1)
        worker.calls[0].go.set()
        assert (await first).status_code == 200
        assert (await running.chat()).status_code == 200
        assert len(worker.calls) == 2  # and none of those who left


async def test_it_ends_in_line_after_a_refusal(workers: Any) -> None:
    """The worker has sent it away, and is asked again and again."""
    (worker,) = await workers("pod-0")
    worker.default = reselects()
    async with run_gateway(worker) as running, asyncio.timeout(20):
        await lets_go(running, lambda _: running.gateway.queue.waiting == 1)


@contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """A listener that accepts nothing, and whose line of connections is full: the kernel lets whoever comes wait."""
    with socket.create_server(("127.0.0.1", port), backlog=0), socket.create_connection(("127.0.0.1", port), timeout=5):
        yield


async def test_it_ends_while_it_connects(workers: Any) -> None:
    """The connection is made all the same, for the next one; the request is not sent on it."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, connect_timeout_seconds=20) as running, asyncio.timeout(30):
        await running.until(lambda: bool(running.gateway.registry.candidates("")))
        (replica,) = running.gateway.registry.candidates("")
        worker.stop_listening()
        await asyncio.sleep(0)  # the loop closes the socket in its next turn
        with full_backlog(worker.port):
            await lets_go(running, lambda number: len(replica.pool._opening) == number + 1)
            assert replica.room.own == 0
        await worker.start()
        await running.until(lambda: not replica.pool._opening)  # the kernel tries again each second
        assert worker.calls == []
        assert (await running.chat(tag="the next")).status_code == 200
        assert [call.json.get("tag") for call in worker.calls] == ["the next"]
