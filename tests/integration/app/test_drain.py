"""A drain, sentence by sentence: what is admitted ends properly, what is new is sent away, nobody is kept waiting."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from app.drain import Drain, DrainStage
from app.intake.uploads import Uploads
from app.lifecycle import Lifecycle
from app.openai.errors import GatewayError
from tests.integration.app.conftest import Running, read_response, run_gateway
from tests.integration.app.fake_worker import (
    DONE,
    MODEL,
    STREAM_HEAD,
    Call,
    chunk,
    event,
    hangs,
    streams_then_waits,
)

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n"
BODY = json.dumps({"model": MODEL}).encode()


async def ends(running: Running, code: int = 0) -> None:
    async with asyncio.timeout(10):
        await running.task
    assert running.server.exit_code == code
    assert running.gateway.lifecycle.state is Lifecycle.STOPPED
    assert running.gateway.drain.stage is DrainStage.DONE
    assert running.gateway.admission.inflight == 0


async def test_a_body_that_is_being_sent_is_admitted(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        reader, writer = await running.raw(HEAD % len(BODY) + BODY[:5])
        await running.until(lambda: running.gateway.admission.inflight == 1)
        running.server.request_drain()
        assert (await running.client.get("/v1/models")).status_code == 200  # costs nothing, holds nothing up
        writer.write(BODY[5:])
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["message"]["content"] == "from pod-0"
        await ends(running)
        assert await reader.read() == b""
        writer.close()


async def test_a_body_that_trickles_does_not_outlast_the_drain(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, drain_timeout_seconds=0.3) as running:
        reader, writer = await running.raw(HEAD % len(BODY) + BODY[:5])
        await running.until(lambda: running.gateway.admission.inflight == 1)
        running.server.request_drain()
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (503, "close")
        assert json.loads(body)["error"]["code"] == "draining"
        await ends(running)
        assert running.gateway.drain.cut == 1
        assert worker.calls == []
        writer.close()


PLAIN = b'data: {"error":{"message":"'
NAMED = b'event: error\ndata: {"type":"error","error":{"message":"'


@pytest.mark.parametrize(
    ("path", "first", "last"),
    [
        ("/v1/chat/completions", event("a"), PLAIN),
        ("/v1/completions", event("a"), PLAIN),
        ("/v1/responses", b'event: response.created\ndata: {"type":"response.created"}\n\n', NAMED),
        ("/v1/messages", b'event: message_start\ndata: {"type":"message_start"}\n\n', NAMED),
    ],
)
async def test_a_stream_that_is_cut_ends_in_the_form_of_its_route(
    workers: Any, path: str, first: bytes, last: bytes
) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(first))
    async with run_gateway(worker, drain_timeout_seconds=0.2) as running:
        body = {"model": MODEL, "stream": True}
        async with running.client.stream("POST", path, json=body) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == first
            running.server.request_drain()
            rest = b"".join([piece async for piece in pieces])
        assert rest.startswith(last)
        assert rest.endswith(b'"code":"draining"}}\n\n' + DONE)
        await ends(running)
        assert worker.calls[0].closed.is_set()
        assert running.gateway.drain.cut == 1


async def test_a_client_that_reads_nothing_is_closed_on_and_costs_no_exit_code(
    workers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.drain.LAST_WORDS_SECONDS", 0.3)
    (worker,) = await workers("pod-0")

    async def endless(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while not call.closed.is_set():
            await call.send(chunk(b"data: " + b"x" * 100_000 + b"\n\n"))

    worker.will(endless)
    caplog.set_level(logging.INFO, "app.drain")
    async with run_gateway(worker, drain_timeout_seconds=0.2) as running:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", running.port))
            body = json.dumps({"model": MODEL, "stream": True}).encode()
            await loop.sock_sendall(client, HEAD % len(body) + body)
            await running.until(lambda: running.gateway.admission.inflight == 1)
            running.server.request_drain("SIGTERM")
            await ends(running)
    said = caplog.messages
    assert said[0] == "SIGTERM: draining 1 request, at most 0.2 s"
    assert said[1] == "drain time is over: ended 1 request"
    assert said[2] == "closed on clients that did not take their answers: 1"
    assert said[3].startswith("drained in ")


async def test_a_connection_that_was_promised_to_stay_is_answered_once_more(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")), hangs)
    async with run_gateway(worker) as running:
        body = json.dumps({"model": MODEL, "stream": True}).encode()
        reader, writer = await running.raw(HEAD % len(body) + body)
        await reader.readuntil(b"\n\n")
        _, other = await running.raw(HEAD % len(BODY) + BODY)
        await worker.call(1)
        running.server.request_drain()
        worker.calls[0].go.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(HEAD % len(BODY) + BODY)
        status, headers, answer = await read_response(reader)
        assert (status, headers["connection"]) == (503, "close")
        assert int(headers["retry-after"]) >= 1
        assert json.loads(answer)["error"]["code"] == "draining"
        assert await reader.read() == b""
        worker.calls[1].go.set()
        await ends(running)
        writer.close()
        other.close()


async def test_idle_connections_stay_until_the_end_and_new_ones_are_answered(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    async with run_gateway(worker) as running:
        idle_reader, idle = await running.raw(b"GET /live HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await read_response(idle_reader))[0] == 200
        reader, writer = await running.raw(HEAD % len(BODY) + BODY)
        await worker.call()
        running.server.request_drain()
        new_reader, new = await running.raw(HEAD % len(BODY) + BODY)
        assert (await read_response(new_reader))[0] == 503
        idle.write(b"GET /live HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await read_response(idle_reader))[0] == 200
        worker.calls[0].go.set()
        assert (await read_response(reader))[0] == 200
        await ends(running)
        assert await idle_reader.read() == b""
        for each in (idle, writer, new):
            each.close()


async def test_progress_is_in_the_log_in_health_and_in_metrics(
    workers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.drain.PROGRESS_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "app.drain")
    (worker,) = await workers("pod-0")
    worker.will(hangs, hangs)
    async with run_gateway(worker, drain_timeout_seconds=30) as running:
        asked = [asyncio.create_task(running.chat()) for _ in range(2)]
        await worker.call(1)
        assert "drain" not in (await running.client.get("/health")).json()
        running.server.request_drain("SIGINT")
        await running.until(lambda: any("2 requests left" in said for said in caplog.messages))
        health = (await running.client.get("/health")).json()
        assert (health["status"], health["drain"]["stage"]) == ("draining", "waiting")
        assert 20 < health["drain"]["remaining_seconds"] < 30
        said = (await running.client.get("/metrics")).text
        assert 'hotspare_drain_stage{stage="waiting"} 1.0' in said
        assert 'hotspare_lifecycle{state="draining"} 1.0' in said
        assert "hotspare_inflight_requests 2.0" in said
        (remaining,) = [line for line in said.splitlines() if line.startswith("hotspare_drain_remaining_seconds ")]
        assert 20 < float(remaining.split()[1]) < 30
        worker.calls[0].go.set()
        await running.until(lambda: any("1 request left" in said for said in caplog.messages))
        worker.calls[1].go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        await ends(running)
    assert caplog.messages[0] == "SIGINT: draining 2 requests, at most 30 s"


async def test_a_drain_without_time_cuts_at_once(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    async with run_gateway(worker, drain_timeout_seconds=0) as running:
        reader, writer = await running.raw(HEAD % len(BODY) + BODY)
        await worker.call()
        running.server.request_drain()
        assert (await read_response(reader))[0] == 503
        await ends(running)
        writer.close()


async def test_a_drain_while_the_workers_are_still_unknown(workers: Any) -> None:
    (worker,) = await workers("pod-0")

    async def never(call: Call) -> None:
        await call.closed.wait()

    worker.watch_behaviour = never
    async with run_gateway(worker, wait_until_ready=False, drain_timeout_seconds=5) as running:
        await running.until(lambda: running.server.started)
        running.server.request_drain()
        await ends(running)


async def test_all_that_is_promised_to_one_that_waits_in_line(workers: Any) -> None:
    """A whole answer, asked for before the drain, for which there is no worker until long after it has begun."""
    (worker,) = await workers("pod-0")
    await worker.die()
    async with run_gateway(worker, drain_timeout_seconds=20, wait_for_worker_seconds=20) as running:
        reader, writer = await running.raw(HEAD % len(BODY) + BODY)
        await running.until(lambda: running.gateway.queue.waiting == 1)
        running.server.request_drain("SIGTERM")
        # Listeners stay open: probes are answered, and whoever is new is sent away, on a connection that ends.
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await running.client.get("/live")).status_code == 200
        late, late_writer = await running.raw(HEAD % len(BODY) + BODY)
        status, headers, body = await read_response(late)
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert (headers["connection"], int(headers["retry-after"]) >= 1) == ("close", True)
        assert await late.read() == b""
        assert running.gateway.queue.waiting == 1
        assert not running.task.done()
        # Whoever waits is served as ever, and only then is it over.
        await worker.start()
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["message"]["content"] == "from pod-0"
        await ends(running)
        assert running.gateway.drain.cut == 0
        assert await reader.read() == b""
        writer.close()
        late_writer.close()


async def test_a_drain_that_fails_says_so(
    workers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(drain: Drain, reason: str) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Drain, "run", fail)
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        running.server.request_drain()
        async with asyncio.timeout(5):
            await running.task
    assert running.server.exit_code == 70
    (said,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert "the drain failed" in said.getMessage()
    assert said.exc_info is not None


async def test_a_bug_in_one_part_leaves_no_request_uninterrupted(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uploads: Uploads, error: GatewayError) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Uploads, "interrupt_all", fail)
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, drain_timeout_seconds=0.1) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == event("a")
        running.server.request_drain()
        assert b'"code":"draining"' in b"".join([piece async for piece in pieces])
        await ends(running)
