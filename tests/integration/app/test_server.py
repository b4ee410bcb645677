"""The server around the relay: probes, limits, disconnects, drain."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from app.drain import DrainStage
from app.lifecycle import Lifecycle
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


def error_of(answer: httpx.Response) -> tuple[int, str]:
    document = answer.json()
    assert list(document["error"]) == ["message", "type", "param", "code"]
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, document["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/internal/watch", 404, "not_found"),
        ("POST", "/internal/watch", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
    ],
)
async def test_errors_of_routing(workers: Any, method: str, path: str, status: int, code: str) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.client.request(method, path)
        assert error_of(answer) == (status, code)
        if status == 405:
            assert answer.headers["allow"]
    assert worker.calls == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", {}, 400, "invalid_json"),
        (b"nonsense", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b"{}", {"content-encoding": "gzip"}, 400, "invalid_content_encoding"),
        (b'{"x":"' + b"y" * 2000 + b'"}', {}, 413, "body_too_large"),
        (b"{}", {"content-type": "application/vnd.hotspare.resume"}, 415, "unsupported_media_type"),
    ],
)
async def test_bodies_that_are_refused(workers: Any, body: bytes, headers: Any, status: int, code: str) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_body_bytes=1024) as running:
        assert error_of(await running.client.post("/v1/completions", content=body, headers=headers)) == (status, code)
        assert running.gateway.admission.inflight == 0
    assert worker.calls == []


async def test_a_body_that_grows_too_large_without_saying_so(workers: Any) -> None:
    (worker,) = await workers("pod-0")

    async def endless() -> Any:
        for _ in range(40):
            yield b" " * 100

    async with run_gateway(worker, max_body_bytes=1024) as running:
        answer = await running.client.post("/v1/completions", content=endless())
        assert error_of(answer) == (413, "body_too_large")


async def test_a_body_that_does_not_come(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, body_timeout_seconds=0.1) as running:
        reader, writer = await running.raw(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{")
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        writer.close()


async def test_a_large_body_arrives_whole(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        assert (await running.chat(padding="é" * 1_500_000)).status_code == 200
        assert worker.calls[0].json["padding"] == "é" * 1_500_000


async def test_bytes_that_are_not_http(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        reader, writer = await running.raw(b"\x16\x03\x01 hello\r\n\r\n")
        status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_request")
        assert headers["x-request-id"]
        assert await reader.read() == b""
        writer.close()


async def test_the_limit_of_requests_in_flight(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    async with run_gateway(worker, max_inflight=1) as running:
        first = asyncio.create_task(running.chat())
        call = await worker.call()
        refused = await running.chat()
        assert error_of(refused) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert 100 <= int(refused.headers["retry-after-ms"]) <= 60_000
        assert (await running.client.get("/health")).status_code == 200
        call.go.set()
        assert (await first).status_code == 200
        assert (await running.chat()).status_code == 200


async def test_probes_do_not_depend_on_workers(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    await worker.die()
    async with run_gateway(worker) as running:
        health = await running.client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "ready", "workers": 1, "routable": 0}
        assert (await running.client.get("/live")).json() == {"status": "ready"}


async def test_health_depends_on_workers_only_if_told_to(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = "app.fleet.outages.NOBODY_SECONDS"
    (worker,) = await workers("pod-0")
    async with (
        run_gateway(worker) as unmoved,
        run_gateway(worker, health_needs_worker=True, wait_for_worker_seconds=0.01) as running,
    ):
        for gateway in (running, unmoved):
            await gateway.until(lambda gateway=gateway: gateway.gateway.registry.nobody_since is None)
        monkeypatch.setattr(too_long, 0.0)
        assert (await running.client.get("/health")).status_code == 200  # a worker is there
        monkeypatch.setattr(too_long, 60.0)
        await worker.die()
        await running.until(lambda: running.gateway.registry.nobody_since is not None)
        assert (await running.client.get("/health")).status_code == 200  # not for long enough
        monkeypatch.setattr(too_long, 0.0)
        health = await running.client.get("/health")
        document = health.json()
        assert (health.status_code, document["status"], document["routable"]) == (503, "no_worker", 0)
        assert "HOTSPARE_HEALTH_NEEDS_WORKER" in document["problem"]
        assert (await running.client.get("/live")).status_code == 200
        assert error_of(await running.chat()) == (503, "no_worker")  # who asks all the same is admitted
        assert (await unmoved.client.get("/health")).json()["status"] == "ready"
        await worker.start()
        await running.until(lambda: running.gateway.registry.nobody_since is None)
        assert (await running.client.get("/health")).json()["status"] == "ready"


async def test_starting_until_each_address_was_tried(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    release = asyncio.Event()

    async def slow_watch(call: Call) -> None:
        await release.wait()
        call.cut(reset=False)

    worker.watch_behaviour = slow_watch
    async with run_gateway(worker, wait_until_ready=False) as running:
        await running.until(lambda: running.server.started)
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert (await running.client.get("/live")).status_code == 200
        release.set()
        await running.until(lambda: running.gateway.lifecycle.state is Lifecycle.READY)
        assert (await running.client.get("/health")).status_code == 200


async def test_status(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        worker.say(steps=5, inflight=2, kv_usage=0.5)
        await running.until(lambda: running.entry(worker).last.line.steps == 5)
        document = (await running.client.get("/status")).json()
        assert (document["lifecycle"], document["inflight"], document["waiting"]) == ("ready", 0, 0)
        (described,) = document["workers"]
        (up,) = described.pop("history")
        assert described == {
            "address": worker.address,
            "worker": "pod-0",
            "instance": "pod-0-life",
            "epoch": 1,
            "engine": "a",
            "problem": None,
            "state": "UP",
            "routable": True,
            "reported": "ACTIVE",
            "models": [MODEL],
            "inflight": 2,
            "capacity": 4096,
            "standby": "STANDBY",
            "steps": 5,
            "kv_usage": 0.5,
        }
        assert (up["state"], up["epoch"]) == ("UP", 1)
        assert 0 < time.monotonic() - up["monotonic"] < 30
        assert abs(time.time() - up["unix"]) < 30


async def test_metrics(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        await running.chat(stream=True)
        await running.chat(model="made-up-by-a-client")
        answer = await running.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.text
    assert f'hotspare_requests_total{{model="{MODEL}",route="chat",status="200"}} 1.0' in text
    assert 'hotspare_requests_total{model="",route="chat",status="404"} 1.0' in text
    assert "made-up" not in text
    assert f'hotspare_worker_state{{address="{worker.address}",state="UP"}} 1.0' in text
    assert f'hotspare_worker_epoch{{address="{worker.address}"}} 1.0' in text
    assert 'hotspare_lifecycle{state="ready"} 1.0' in text
    assert 'hotspare_time_to_first_token_seconds_count{route="chat"} 1.0' in text


async def test_a_client_that_leaves_while_it_sends(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        _, writer = await running.raw(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{")
        await running.until(lambda: running.gateway.admission.inflight == 1)
        writer.transport.abort()
        await running.until(lambda: running.gateway.admission.inflight == 0)


async def test_drain_lets_admitted_requests_end(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, drain_timeout_seconds=5) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        running.server.request_drain()
        refused = await running.chat()
        assert error_of(refused) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await running.client.get("/live")).status_code == 200
        assert (await running.client.get("/v1/models")).status_code == 200
        worker.calls[0].go.set()
        assert b"".join([piece async for piece in pieces]) == DONE
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0
        assert running.gateway.lifecycle.state is Lifecycle.STOPPED


async def test_drain_that_runs_out_of_time(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")), hangs)
    async with run_gateway(worker, drain_timeout_seconds=0.2) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        whole = asyncio.create_task(running.chat())
        await worker.call(1)
        running.server.request_drain()
        rest = b"".join([piece async for piece in pieces])
        assert b'"code":"draining"' in rest
        assert rest.endswith(DONE)
        assert error_of(await whole) == (503, "draining")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0
        assert all(call.closed.is_set() for call in worker.calls)


async def test_drain_of_requests_that_wait_for_a_worker(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    await worker.die()
    async with run_gateway(worker, drain_timeout_seconds=0.2) as running:
        asked = asyncio.create_task(running.chat())
        await running.until(lambda: running.gateway.queue.waiting == 1)
        running.server.request_drain()
        assert error_of(await asked) == (503, "draining")


async def test_a_slow_reader_is_given_up(workers: Any) -> None:
    (worker,) = await workers("pod-0")

    async def endless(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while not call.closed.is_set():
            await call.send(chunk(b"data: " + b"x" * 100_000 + b"\n\n"))

    worker.will(endless)
    async with run_gateway(worker, client_write_timeout_seconds=0.3) as running:
        _, writer = await running.raw_chat(stream=True)
        await running.until(lambda: running.gateway.admission.inflight == 1)
        await running.until(lambda: running.gateway.admission.inflight == 0)
        writer.transport.abort()


async def slow_reader(running: Running, buffer: int = 4096) -> socket.socket:
    """A client that has asked for a whole answer and reads nothing yet."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", running.port))
    body = json.dumps({"model": MODEL}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(body)
    await loop.sock_sendall(client, head + body)
    return client


LARGE = {"text": "x" * 3_900_000}  # one message, and more than socket buffers take


async def test_a_request_is_in_flight_until_its_last_byte_is_out(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(document=LARGE))
    async with run_gateway(worker, max_inflight=1) as running:
        client = await slow_reader(running)
        with client:
            reader, writer = await asyncio.open_connection(sock=client, limit=1 << 23)
            await reader.readuntil(b"\r\n\r\n")  # so the answer is on its way, and stuck
            writer.transport.pause_reading()
            assert error_of(await running.chat()) == (429, "overloaded")
            running.server.request_drain()
            await running.until(lambda: running.gateway.drain.stage is not DrainStage.NONE)
            await running.read_all()  # a drain that has nothing to wait for is over by then
            assert running.gateway.lifecycle.state is Lifecycle.DRAINING
            writer.transport.resume_reading()
            async with asyncio.timeout(5):
                assert json.loads(await reader.read()) == LARGE
            writer.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0


async def test_a_client_that_never_reads_its_answer_is_cut_off(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(document=LARGE))
    async with run_gateway(worker, client_write_timeout_seconds=0.2) as running:
        with await slow_reader(running):
            await running.until(lambda: running.gateway.admission.inflight == 1)
            await running.until(lambda: running.gateway.admission.inflight == 0)
            # Its bytes are not kept for ever either.
            await running.until(lambda: len(running.server.server_state.connections) == 0)


async def test_a_client_that_reads_slowly_but_reads_is_not_cut_off(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(document=LARGE))
    async with run_gateway(worker, client_write_timeout_seconds=1) as running:
        with await slow_reader(running, buffer=65536) as client:
            seen = b""
            while not seen.endswith(b'x"}'):
                piece = await asyncio.get_running_loop().sock_recv(client, 65536)
                assert piece
                seen += piece
                await asyncio.sleep(0.025)  # 2.6 MB/s, so that it takes longer than the limit
            assert json.loads(seen.partition(b"\r\n\r\n")[2]) == LARGE


GET = b"GET /live HTTP/1.1\r\nhost: g\r\n"
FILLER = [b"x-%d: %b\r\n" % (number, b"y" * 8000) for number in range(9)]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"".join([GET, *FILLER, b"\r\n"])],
        [GET, *FILLER],
        [GET + b"x: ", *[b"y" * 8000] * 9],
        [b"GET /", *[b"y" * 8000] * 9],
        [GET + b"\r\n" + GET, *FILLER],
    ],
    ids=["in one read", "header by header", "one long header", "request line", "second request"],
)
async def test_a_head_that_is_too_long(workers: Any, pieces: list[bytes]) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        reader, writer = await running.raw(b"")
        for piece in pieces:
            writer.write(piece)
            await running.read_all()
        status, headers, body = await read_response(reader)
        if status == 200:
            status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (431, "head_too_large")
        assert (headers["connection"], headers["content-type"]) == ("close", "application/json")
        assert await reader.read() == b""
        writer.close()


async def test_long_heads_and_pipelined_bodies_within_the_limit(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        body = json.dumps({"model": MODEL, "padding": "z" * 200_000}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n" % len(body)
        whole = b"".join([post, *FILLER[:7], b"\r\n", body])
        reader, writer = await running.raw(whole + whole[:30_000])
        assert (await read_response(reader))[0] == 200
        writer.write(whole[30_000:] + whole)
        for _ in range(2):
            assert (await read_response(reader))[0] == 200
        writer.close()


async def test_a_head_that_is_too_long_behind_an_answer_that_runs(workers: Any) -> None:
    """Nothing can be said in the middle of a stream: it ends well, and then the connection does."""
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker) as running:
        reader, writer = await running.raw_chat(stream=True)
        await reader.readuntil(event("a"))
        writer.write(b"".join([GET, *FILLER]))
        await running.read_all()
        worker.calls[0].go.set()
        assert await reader.read() == b"\r\n" + chunk(DONE) + b"0\r\n\r\n"
        writer.close()


@pytest.mark.parametrize("sent", [GET, GET + b"\r\n" + GET[:5]], ids=["first", "second"])
async def test_a_head_that_does_not_end(workers: Any, sent: bytes) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, head_timeout_seconds=0.2) as running:
        reader, writer = await running.raw(sent)
        if b"\r\n\r\n" in sent:
            assert (await read_response(reader))[0] == 200
        while not reader.at_eof():  # a byte now and then does not help
            writer.write(b"x")
            await asyncio.sleep(0.02)
            if reader._buffer:  # type: ignore[attr-defined]
                break
        status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert headers["connection"] == "close"
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"\r\n", GET + b"\r\n\r\n"], ids=["nothing", "a line", "a line afterwards"])
async def test_a_connection_that_asks_nothing(workers: Any, sent: bytes) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, head_timeout_seconds=0.2) as running:
        reader, writer = await running.raw(sent)
        if sent.startswith(b"GET"):
            assert (await read_response(reader))[0] == 200
            writer.write(b"\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.read() == b""
        writer.close()


async def test_the_deadline_of_the_head_is_not_that_of_body_or_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, head_timeout_seconds=0.5) as running:
        body = json.dumps({"model": MODEL, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await running.raw(head)
        await asyncio.sleep(1.0)
        writer.write(body)
        await reader.readuntil(event("a"))
        await asyncio.sleep(1.0)
        worker.calls[0].go.set()
        await reader.readuntil(DONE)
        writer.close()


async def test_two_requests_on_one_connection_at_once(workers: Any) -> None:
    """Pipelining: answered in order, each whole."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        body = json.dumps({"model": MODEL}).encode()
        one = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\nx-request-id: %b\r\n\r\n%b"
        reader, writer = await running.raw(one % (len(body), b"first", body) + one % (len(body), b"second", body))
        answers = [await read_response(reader) for _ in range(2)]
        assert [(status, headers["x-request-id"]) for status, headers, _ in answers] == [
            (200, "first"),
            (200, "second"),
        ]
        writer.close()
