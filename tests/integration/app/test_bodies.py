"""How bodies come: compressed, in chunks, after a question, slowly, and not at all."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from backports import zstd

from tests.integration.app.conftest import read_response, run_gateway
from tests.integration.app.fake_worker import MODEL, chunk

BODY = json.dumps({"model": MODEL, "padding": "x" * 300}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\n"
MADE: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress, "deflate": zlib.compress}


def padded(size: int) -> bytes:
    """A body of so many bytes."""
    body = json.dumps({"model": MODEL, "padding": ""}).encode()
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


@pytest.mark.parametrize("coding", MADE)
async def test_a_compressed_body(workers: Any, coding: str) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for number, body in enumerate((BODY, padded(3 << 20))):  # the larger one is decoded in a thread
            answer = await running.client.post(
                "/v1/completions",
                content=MADE[coding](body),
                headers={"content-encoding": coding, "content-digest": "x", "x-other": "y"},
            )
            assert answer.status_code == 200
            call = worker.calls[number]
            assert call.body == body
            assert call.headers["content-length"] == str(len(body))
            assert call.headers["x-other"] == "y"
            assert not {"content-encoding", "content-digest"} & set(call.headers)


async def test_compressed_bodies_that_are_refused(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    bomb = bytes(64 << 20)
    async with run_gateway(worker, max_body_bytes=1 << 20) as running:

        async def post(content: bytes, *codings: str) -> tuple[int, str]:
            answer = await running.client.post(
                "/v1/completions", content=content, headers=[("content-encoding", coding) for coding in codings]
            )
            assert answer.headers["x-request-id"]
            if answer.status_code == 415:
                assert answer.headers["accept-encoding"] == "gzip, zstd, deflate"
            return answer.status_code, answer.json()["error"]["code"]

        for coding, make in MADE.items():
            assert await post(make(bomb), coding) == (413, "body_too_large")
            assert await post(make(BODY)[:-4], coding) == (400, "invalid_content_encoding")
            assert await post(BODY, coding) == (400, "invalid_content_encoding")
            assert await post(make(b"no json"), coding) == (400, "invalid_json")
        assert await post(gzip.compress(zstd.compress(BODY)), "zstd, gzip") == (415, "unsupported_content_encoding")
        assert await post(gzip.compress(zstd.compress(BODY)), "zstd", "gzip") == (415, "unsupported_content_encoding")
        assert await post(BODY, "br") == (415, "unsupported_content_encoding")
        assert worker.calls == []
        assert await post_is_fine(running)


async def post_is_fine(running: Any) -> bool:
    return bool((await running.chat()).status_code == 200)


async def test_other_requests_are_served_while_a_large_body_is_decoded(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    coded = gzip.compress(padded(30 << 20), 1)
    async with run_gateway(worker) as running:
        large = asyncio.create_task(
            running.client.post("/v1/completions", content=coded, headers={"content-encoding": "gzip"})
        )
        served = 0
        while not large.done():
            assert (await running.client.get("/live")).status_code == 200
            served += 1
        assert (await large).status_code == 200
        assert served > 1


@pytest.mark.parametrize("line", [b"Expect: 100-continue\r\n", b"expect: 100-Continue\r\n"])
async def test_a_client_that_asks_before_it_sends(workers: Any, line: bytes) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(b"")
        for _ in range(2):
            writer.write(POST + line + b"content-length: %d\r\n\r\n" % len(BODY))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            status, headers, _ = await read_response(reader)
            assert (status, headers.get("connection")) == (200, None)
        writer.write(POST + line + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))  # one that does not wait
        assert (await read_response(reader))[0] == 200
        writer.close()
    assert [call.body for call in worker.calls] == [BODY] * 3
    assert all("expect" not in call.headers for call in worker.calls)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"expect: 100-continue\r\ncontent-length: 9\r\ncontent-encoding: br\r\n\r\n", 415),
        (b"expect: 200-ok\r\ncontent-length: 9\r\n\r\n", 417),
        (b"expect: 100-continue, x\r\ncontent-length: 9\r\n\r\n", 417),
    ],
)
async def test_a_client_that_asks_and_is_refused(workers: Any, lines: bytes, status: int) -> None:
    """It is not asked for its body, and what it sends instead is no request."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(POST + lines)
        found, headers, _ = await read_response(reader)
        assert (found, headers["connection"]) == (status, "close")
        writer.write(POST + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
        assert await reader.read() == b""
        writer.close()
    assert worker.calls == []


async def test_an_expectation_in_http_1_0_means_nothing(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    head = b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(head)
        await running.until(lambda: running.gateway.admission.inflight == 1)
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("connection", [b"", b"connection: keep-alive\r\n"])
async def test_http_1_0(workers: Any, connection: bytes) -> None:
    """One request a connection: that is always allowed, and its length is known in any case."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        for stream in (False, True):
            body = json.dumps({"model": MODEL, "stream": stream}).encode()
            reader, writer = await running.raw(
                b"POST /v1/completions HTTP/1.0\r\n%bcontent-length: %d\r\n\r\n%b" % (connection, len(body), body)
            )
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")  # to the end of the connection
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nconnection: close" in head
            assert b"transfer-encoding" not in head or running.server.config.direct == {}
            assert rest.rstrip().endswith(b"[DONE]") or rest.endswith(b"0\r\n\r\n") if stream else json.loads(rest)
            writer.close()


async def test_bodies_in_the_smallest_chunks(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    body = padded(50_000)
    chunks = b"".join(b"2\r\n%b\r\n" % body[i : i + 2] for i in range(0, len(body), 2)) + b"0\r\n\r\n"
    async with run_gateway(worker) as running, asyncio.timeout(10):
        reader, writer = await running.raw(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert (await read_response(reader))[0] == 200
        writer.close()
    assert worker.calls[0].body == body


async def test_chunks_beyond_the_limit(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_body_bytes=1024) as running, asyncio.timeout(5):
        part = b"100\r\n" + b"x" * 256 + b"\r\n"
        reader, writer = await running.raw(POST + b"transfer-encoding: chunked\r\n\r\n" + part * 5)
        status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"
        writer.close()
    assert worker.calls == []


async def test_a_body_that_trickles(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, body_stall_timeout_seconds=0.3) as running, asyncio.timeout(5):
        reader, writer = await running.raw(POST + b"content-length: 5000\r\n\r\n")
        answered = asyncio.create_task(read_response(reader))
        while not answered.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        status, headers, body = await answered
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert "1024 bytes" in json.loads(body)["error"]["message"]
        assert headers["connection"] == "close"
        writer.close()


async def test_a_body_that_is_slow_but_comes(workers: Any) -> None:
    """It takes longer than the limit, while each part of it comes in far less."""
    (worker,) = await workers("pod-0")
    limit = 2.0
    async with run_gateway(worker, body_stall_timeout_seconds=limit) as running, asyncio.timeout(20):
        reader, writer = await running.raw(POST + b"transfer-encoding: chunked\r\n\r\n")
        began = time.monotonic()
        pieces = [BODY]
        while time.monotonic() < began + 1.3 * limit:
            writer.write(chunk(pieces[-1]))
            await asyncio.sleep(limit / 12)
            pieces.append(b" " * 1100)
        writer.write(chunk(pieces[-1]) + b"0\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        writer.close()
    assert worker.calls[0].body == b"".join(pieces)
