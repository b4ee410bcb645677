"""A request ends once: nothing of it is left afterwards, whatever it ended of; nothing follows on its connection."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.clients.direct import DirectCycle
from app.relay.exchange import Exchange
from tests.integration.app.conftest import PATIENCE_SECONDS, Running, read_response, run_gateway
from tests.integration.app.fake_worker import (
    DONE,
    MODEL,
    STREAM_HEAD,
    Call,
    answers,
    chunk,
    event,
    hangs,
    streams_then_waits,
)


def alive() -> int:
    gc.collect()
    return sum(isinstance(found, Exchange) for found in gc.get_objects())


def request(*, stream: bool) -> bytes:
    body = json.dumps({"model": MODEL, "stream": stream}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def test_a_stalled_stream_is_over_when_it_was_ended(workers: Any) -> None:
    """Its keep-alives were due later: none comes, and the connection serves the next request."""
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(
        worker, first_byte_timeout_seconds=0.2, stall_timeout_seconds=0.2, keepalive_seconds=0.3
    ) as running:
        reader, writer = await running.raw_chat(stream=True)
        status, _, body = await read_response(reader)
        assert (status, body.endswith(DONE)) == (200, True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):  # more than two keep-alives' time
                await reader.read(1)
        await running.until(lambda: alive() == 0)
        writer.write(request(stream=False))
        status, _, body = await read_response(reader)
        assert (status, json.loads(body)["object"]) == (200, "chat.completion")
        writer.close()


async def test_stalled_requests_leave_nothing(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(
        worker,
        first_byte_timeout_seconds=0.05,
        stall_timeout_seconds=0.05,
        keepalive_seconds=0.1,
        resume_limit=1,
    ) as running:
        for number in range(10):
            worker.will(streams_then_waits(event("a")) if number % 2 else hangs)
            await running.chat(stream=bool(number % 2))
        await running.until(lambda: alive() == 0)
        assert running.gateway.admission.inflight == 0


async def test_requests_that_end_at_once_leave_nothing_to_the_collector(workers: Any) -> None:
    """No circles: they are gone without it."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        await running.chat(model="unknown")
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert (await running.chat(model="unknown")).status_code == 404
                assert (await running.chat()).status_code == 200
            await running.until(lambda: running.gateway.admission.inflight == 0)
            left = sum(isinstance(found, Exchange) for found in gc.get_objects())
            assert left <= 1  # the last one may still be the connection's
        finally:
            gc.enable()


async def test_silence_after_the_end_marker_is_no_error(workers: Any) -> None:
    (worker,) = await workers("pod-0")

    async def forgets_the_last_chunk(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(event("a")) + chunk(DONE))
        await call.closed.wait()

    worker.will(forgets_the_last_chunk)
    async with run_gateway(worker, stall_timeout_seconds=0.1) as running:
        answer = await running.chat(stream=True)
        assert answer.content == event("a") + DONE


@asynccontextmanager
async def deaf_client(running: Running) -> AsyncIterator[socket.socket]:
    """One that reads nothing, with little room in its socket."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", running.port))
        yield client
    finally:
        client.close()


async def test_a_client_that_did_not_read_its_last_answer_holds_no_more_of_the_next(workers: Any) -> None:
    """The second request begins while the transport is paused; its worker has 64 MiB to say."""
    (worker,) = await workers("pod-0")
    sent = 0
    stuck = asyncio.Event()

    async def says_much(call: Call) -> None:
        nonlocal sent
        await call.send(STREAM_HEAD)
        for _ in range(64):
            call.writer.write(chunk(event("x" * (1 << 20))))
            try:
                async with asyncio.timeout(0.5):
                    await call.writer.drain()
            except TimeoutError:
                stuck.set()
                await call.closed.wait()
                return
            sent += 1
        stuck.set()

    async with run_gateway(worker) as running, deaf_client(running) as client:
        worker.will(answers(document={"x": "x" * (3 << 20)}))
        worker.will(says_much)
        await asyncio.get_running_loop().sock_sendall(client, request(stream=False))
        await worker.call(0)
        await asyncio.get_running_loop().sock_sendall(client, request(stream=True))
        async with asyncio.timeout(10):
            await stuck.wait()
        assert sent < 16
        (connection,) = [c for c in running.server.server_state.connections if c.transport.get_write_buffer_size()]
        assert connection.transport.get_write_buffer_size() < 5 << 20  # the first answer, and less than 1 MiB
    await running.until(lambda: running.gateway.admission.inflight == 0)


async def test_an_asgi_server_that_cancels_while_a_body_is_decoded(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        body = gzip.compress(b'{"model":"%b","x":"%b"}' % (MODEL.encode(), b"a" * (16 << 20)), 1)
        scope = {
            "type": "http",
            "method": "POST",
            "raw_path": b"/v1/chat/completions",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")],
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            raise AssertionError(message)

        task = asyncio.create_task(running.server.config.app(scope, receive, send))
        await running.until(lambda: running.gateway.admission.inflight == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await running.until(lambda: running.gateway.admission.inflight == 0)


async def test_an_asgi_server_that_says_by_an_error_that_the_client_is_gone(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker) as running:
        body = request(stream=True).partition(b"\r\n\r\n")[2]
        scope = {
            "type": "http",
            "method": "POST",
            "raw_path": b"/v1/chat/completions",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            raise ConnectionResetError

        await running.server.config.app(scope, receive, send)
        assert running.gateway.admission.inflight == 0
        call = await worker.call(0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await call.closed.wait()


@pytest.mark.parametrize("leaves", ["close", "half-close", "reset"])
async def test_a_client_that_pipelines_and_leaves_is_noticed(workers: Any, leaves: str) -> None:
    """While a second request waits for its turn the socket is read on, so that its end is heard."""
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    async with run_gateway(worker) as running:
        _, writer = await running.raw(request(stream=False) + request(stream=False) + b"POST /v1/")
        call = await worker.call(0)
        if leaves == "close":
            writer.close()
        elif leaves == "half-close":
            writer.write_eof()
        else:
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await call.closed.wait()
        await running.until(lambda: running.gateway.admission.inflight == 0)
        assert len(worker.calls) == 1
        writer.close()


async def test_a_body_that_comes_while_its_request_waits(workers: Any) -> None:
    """In pieces, and more than one request behind another: each is answered in turn."""
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a"), then=DONE))
    async with run_gateway(worker) as running:
        second = request(stream=False)
        reader, writer = await running.raw(request(stream=True) + second[:-10])
        call = await worker.call(0)
        writer.write(second[-10:-5])
        await writer.drain()
        writer.write(second[-5:] + second)
        await writer.drain()
        call.go.set()
        answers = [await read_response(reader) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 200, 200]
        assert len(worker.calls) == 3
        writer.close()


async def test_too_much_ahead_ends_the_connection_and_no_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a"), then=DONE))
    async with run_gateway(worker) as running:
        reader, writer = await running.raw(request(stream=True) + request(stream=False))
        call = await worker.call(0)
        for _ in range(40):
            writer.write(request(stream=False) * 100)
            await writer.drain()
        call.go.set()
        assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]
        async with asyncio.timeout(5):
            await reader.read()
        assert len(worker.calls) == 2
        writer.close()


async def test_uploads_that_were_broken_off_hold_no_memory(workers: Any) -> None:
    """Not even until the collector comes."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % (6 << 20)
                _, writer = await running.raw(head + b"x" * (5 << 20))
                await running.until(lambda: running.gateway.admission.inflight == 1)
                writer.close()
                await running.until(lambda: running.gateway.admission.inflight == 0)
            held = sum(len(found._body) for found in gc.get_objects() if isinstance(found, DirectCycle))
            assert held == 0
        finally:
            gc.enable()
