"""What a client's bytes are taken for: upgrades that are offered, framing that is not understood, paths."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import pytest

from app.clients.protocol import MAX_PIPELINED
from tests.integration.app.conftest import read_response, run_gateway
from tests.integration.app.fake_worker import MODEL

BODY = json.dumps({"model": MODEL, "padding": "x" * 300}).encode()
OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    "two lines": b"connection: keep-alive\r\nconnection: upgrade\r\nupgrade: foo/2\r\nupgrade: h2c\r\n",
}
FRAMINGS = {
    "length": (b"content-length: %d\r\n" % len(BODY), BODY),
    "chunked": (
        b"transfer-encoding: chunked\r\n",
        b"%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\n\r\n" % (100, BODY[:100], len(BODY) - 100, BODY[100:]),
    ),
}


@pytest.mark.parametrize("bytewise", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_to_upgrade_is_ignored(workers: Any, offer: str, framing: str, bytewise: bool) -> None:
    (worker,) = await workers("pod-0")
    length, body = FRAMINGS[framing]
    whole = b"POST /v1/completions?a=b HTTP/1.1\r\nhost: g\r\n%b%b\r\n%b" % (OFFERS[offer], length, body)
    async with run_gateway(worker) as running, asyncio.timeout(10):
        reader, writer = await running.raw(b"")
        for number in range(3):
            if bytewise:
                for i in range(len(whole)):
                    writer.write(whole[i : i + 1])
                    await asyncio.sleep(0)
            else:
                writer.write(whole)
            status, headers, _ = await read_response(reader)
            assert (status, headers.get("connection")) == (200, None)
            call = worker.calls[number]
            assert (call.target, call.body) == ("/v1/completions?a=b", BODY)
            assert not {"upgrade", "http2-settings"} & set(call.headers)
        writer.write(whole + whole)  # and in a pipeline
        assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]
        writer.close()
    assert [call.body for call in worker.calls] == [BODY] * 5


POST = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
GET = b"GET /v1/models HTTP/1.1\r\nhost: g\r\n\r\n"


@pytest.mark.parametrize("last", [GET, POST], ids=["application", "relay"])
@pytest.mark.parametrize("first", [GET, POST], ids=["application first", "relay first"])
async def test_more_requests_in_a_pipeline_than_may_wait(workers: Any, first: bytes, last: bytes) -> None:
    """What came before is answered, and the last answer says that it is the last."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(20):
        reader, writer = await running.raw(first + last * 80)
        answers = [await read_response(reader) for _ in range(1 + MAX_PIPELINED)]
        assert await reader.read() == b""
        writer.close()
    assert {status for status, _, _ in answers} == {200}
    said = [headers.get("connection") for _, headers, _ in answers]
    assert said == [None] * MAX_PIPELINED + ["close"]


async def test_a_web_socket_elsewhere_is_refused_in_the_envelope(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(b"")
        for path in (b"/v1/realtime/elsewhere", b"/v1/chat/completions"):
            writer.write(b"GET %b HTTP/1.1\r\nhost: g\r\n%b\r\n" % (path, OFFERS["websocket"]))
            status, headers, body = await read_response(reader)
            assert (status, headers["content-type"]) == (404 if b"realtime" in path else 405, "application/json")
            assert json.loads(body)["error"]["code"] in ("not_found", "method_not_allowed")
        writer.close()


async def test_a_web_socket_behind_a_request_that_is_being_answered_is_refused(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    post = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    offer = b"GET /v1/realtime?model=tiny HTTP/1.1\r\nhost: g\r\n%b\r\n" % OFFERS["websocket"]
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(post + offer + post)
        answers = [await read_response(reader) for _ in range(3)]
        assert [status for status, _, _ in answers] == [200, 426, 200]
        writer.close()


async def test_connect_is_refused(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n\x16\x03")
        status, _, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_offers_http2(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        process = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--show-error", "--http2", "--max-time", "5", "--noproxy", "*"),
            *("--header", "content-type: application/json", "--data-binary", BODY.decode()),
            *("--write-out", "\n%{http_code}", f"{running.base_url}/v1/completions"),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert b"from pod-0" in out
        assert out.splitlines()[-1] == b"200"
    assert worker.calls[0].body == BODY


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("POST", "/v1%2fcompletions", 404),
        ("POST", "/v1%2Fcompletions?x=%2f", 404),
        ("POST", "/%761/completions", 404),
        ("GET", "/v1%2fcompletions", 404),
        ("POST", "/v1/completions%3fx", 404),
        ("POST", "/v1/../v1/completions", 404),
        ("POST", "//v1/completions", 404),
        ("GET", "/%68ealth", 404),
        ("GET", "/v1%2fmodels", 404),
        ("GET", "/v1%2fmodels/org%2ftiny", 404),
        ("GET", "/v1/models/org%2ftiny", 200),
        ("GET", "/v1/models/org/tiny", 200),
        ("POST", "/v1/completions?x=%2f", 200),
    ],
)
async def test_paths_mean_what_is_written(workers: Any, method: str, target: str, status: int) -> None:
    (worker,) = await workers("pod-0", models=(MODEL, "org/tiny"))
    body = BODY if method == "POST" else b""
    async with run_gateway(worker) as running, asyncio.timeout(5):
        await running.until(lambda: bool(running.gateway.registry.candidates(MODEL)))
        head = f"{method} {target} HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await running.raw(head.encode() + body)
        found, headers, answer = await read_response(reader)
        assert found == status
        assert headers["x-request-id"]
        if status == 404:
            assert json.loads(answer)["error"]["code"] == "not_found"
        writer.close()
    assert [call.target for call in worker.calls] == ([target] if (method, status) == ("POST", 200) else [])


@pytest.mark.parametrize("offer", [b"", OFFERS["h2c"]], ids=["", "with an offer"])
@pytest.mark.parametrize(
    "coding",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding: identity\r\n",
    ],
)
async def test_transfer_codings_that_nobody_undoes(workers: Any, coding: bytes, offer: bytes) -> None:
    (worker,) = await workers("pod-0")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\n%b%b\r\n" % (coding, offer)
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(head)
        status, headers, body = await read_response(reader)
        # Where chunked is not the last one, the parser itself takes offence.
        assert (status, json.loads(body)["error"]["code"]) in (
            (501, "unsupported_transfer_encoding"),
            (400, "malformed_request"),
        )
        assert headers["connection"] == "close"
        assert await reader.read() == b""
        writer.close()
    assert worker.calls == []
