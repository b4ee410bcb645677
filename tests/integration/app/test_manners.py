"""HEAD, OPTIONS, CORS, request ids, half-closed clients, the limit of connections, and curl as it comes."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.telemetry.access_log import AccessLog
from tests.integration.app.conftest import Running, read_response, run_gateway
from tests.integration.app.fake_worker import MODEL, event, hangs, streams_then_waits

BODY = json.dumps({"model": MODEL}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n" % len(BODY)
GETS = ["/health", "/live", "/metrics", "/status", "/v1/models", f"/v1/models/{MODEL}"]


async def test_head_on_every_route_that_can_be_read(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        await running.until(lambda: bool(running.gateway.registry.candidates(MODEL)))
        for path in GETS:
            got, head = await running.client.get(path), await running.client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            if path not in ("/metrics", "/status"):  # these change by being asked
                assert head.headers["content-length"] == str(len(got.content))
            assert head.headers["x-request-id"]
        # No body follows: the next answer begins where the head ended.
        reader, writer = await running.raw(b"HEAD /live HTTP/1.1\r\nhost: g\r\n\r\n" + POST + b"\r\n" + BODY)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await read_response(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/completions", 405), ("/v1/models/other", 404)])
async def test_head_of_an_error(workers: Any, path: str, status: int) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.client.head(path)
        assert (answer.status_code, answer.content) == (status, b"")


@pytest.mark.parametrize("origin", [None, "https://a.example"])
async def test_options_says_what_there_is(workers: Any, origin: str | None) -> None:
    (worker,) = await workers("pod-0")
    headers = {} if origin is None else {"origin": origin, "access-control-request-method": "POST"}
    async with run_gateway(worker) as running:
        for path in GETS:
            answer = await running.client.options(path, headers=headers)
            assert (answer.status_code, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
            assert answer.headers["x-request-id"]
        answer = await running.client.options("/v1/completions", headers=headers)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, "OPTIONS, POST", b"")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await running.client.options("/nowhere")).status_code == 404
        refused = await running.client.get("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
        refused = await running.client.delete("/live")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        reader, writer = await running.raw(b"OPTIONS * HTTP/1.1\r\nhost: g\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204 No Content\r\n")
        assert b"allow: GET, HEAD, OPTIONS, POST\r\n" in head
        writer.close()
    assert worker.calls == []


ORIGIN = "https://chat.example"


@pytest.mark.parametrize("allowed", [f"http://b, {ORIGIN}/", "*"], ids=["listed", "all"])
async def test_cors(workers: Any, allowed: str) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, cors_allow_origins=allowed, max_body_bytes=1024, max_inflight=4) as running:
        said = "*" if allowed == "*" else ORIGIN
        asked = {
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-a",
        }
        answer = await running.client.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == said
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
        assert answer.headers["access-control-allow-headers"] == "authorization, x-a"
        assert answer.headers["access-control-max-age"] == "600"
        # Every answer says it: streams, whole ones, errors of the relay, of the application and of the protocol.
        body = {"model": MODEL, "messages": [], "stream": True}
        async with running.client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"origin": ORIGIN}
        ) as stream:
            worker.calls[0].go.set()
            await stream.aread()
            answers = [stream]
        for method, path, content in (
            ("POST", "/v1/completions", BODY),
            ("POST", "/v1/completions", b"no json"),
            ("POST", "/v1/completions", b"x" * 2000),
            ("GET", "/live", b""),
            ("GET", "/nowhere", b""),
            ("GET", "/%6cive", b""),
        ):
            answers.append(await running.client.request(method, path, content=content, headers={"origin": ORIGIN}))
        assert [answer.status_code for answer in answers] == [200, 200, 400, 413, 200, 404, 404]
        for answer in answers:
            assert answer.headers.get_list("access-control-allow-origin") == [said]
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers.get("vary") == (None if allowed == "*" else "Origin")
        reader, writer = await running.raw(b"GET /x#y HTTP/1.1\r\nhost: g\r\norigin: %b\r\n\r\n" % ORIGIN.encode())
        assert (await read_response(reader))[1]["access-control-allow-origin"] == said
        writer.close()
        # Others are not told that they may.
        if allowed != "*":
            answer = await running.client.options("/v1/completions", headers=asked | {"origin": "https://evil.example"})
            assert not [name for name in answer.headers if name.startswith("access-control")]
            answer = await running.client.get("/live", headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "Origin"


async def test_cors_with_keys(workers: Any) -> None:
    """A preflight comes without a key, and a page must be able to read that its key is wrong."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, cors_allow_origins=ORIGIN, api_keys="secret-key-1") as running:
        asked = {"origin": ORIGIN, "access-control-request-method": "GET"}
        assert (await running.client.options("/v1/models", headers=asked)).status_code == 204
        for path in ("/v1/models", "/v1/completions"):
            answer = await running.client.request("GET", path, headers={"origin": ORIGIN})
            assert answer.status_code == 401
            assert answer.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("a b", False), ("x" * 129, False), ("é", False)])
async def test_request_ids_on_every_answer(workers: Any, given: str, kept: bool) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        asked = [
            (b"POST", b"/v1/completions", BODY, b""),
            (b"POST", b"/v1/completions", b"no json", b""),
            (b"GET", b"/v1/completions", b"", b""),
            (b"GET", b"/live", b"", b""),
            (b"GET", b"/nowhere", b"", b""),
            (b"GET", b"/x#y", b"", b""),
            (b"GET", b"/live", b"", b"host: other\r\n"),
            (b"POST", b"/v1/completions", b"", b"expect: nonsense\r\n"),
        ]
        made = set()
        for method, target, body, more in asked:
            reader, writer = await running.raw(
                b"%b %b HTTP/1.1\r\nhost: g\r\nx-request-id: %b\r\ncontent-length: %d\r\n%b\r\n%b"
                % (method, target, given.encode(), len(body), more, body)
            )
            _, headers, _ = await read_response(reader)
            made.add(headers["x-request-id"])
            writer.close()
        assert made == {given} if kept else len(made) == len(asked)
        assert all(re.fullmatch(r"[A-Za-z0-9._:+/=-]{1,128}", request_id) for request_id in made)


async def test_what_travels_and_what_does_not(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    given = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=1",
        "x-mine": "kept",
        "x-hotspare-stream": "0",
        "x-hotspare-worker-token": "guess",
        "X-Hotspare-Anything": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "x-hop": "1",
        "x-hop-2": "1",
    }
    async with run_gateway(worker) as running:
        answer = await running.client.post(
            "/v1/completions",
            content=BODY,
            headers=[*given.items(), ("connection", "keep-alive, X-Hop"), ("connection", "x-hop-2")],
        )
        assert answer.status_code == 200
        assert int(answer.headers["openai-processing-ms"]) < 5000
    seen = worker.calls[0].headers
    assert (seen["tracestate"], seen["x-mine"]) == ("a=1", "kept")
    assert seen["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert not {"x-hop", "x-hop-2", "keep-alive", "te", "x-hotspare-anything"} & set(seen)
    assert seen.get("x-hotspare-worker-token") != "guess"
    assert seen.get("x-hotspare-stream") != "0"


async def test_a_client_that_has_shut_down_its_side_is_answered_where_that_is_cheap(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    async with run_gateway(worker) as running, asyncio.timeout(5):
        for method in (b"GET", b"OPTIONS"):
            reader, writer = await running.raw(b"%b /live HTTP/1.1\r\nhost: g\r\n\r\n" % method)
            writer.write_eof()
            assert (await reader.read()).startswith(b"HTTP/1.1 20")
            writer.close()
        # To a request that occupies a worker it is the client's leaving.
        reader, writer = await running.raw(POST + b"\r\n" + BODY)
        call = await worker.call()
        writer.write_eof()
        await call.closed.wait()
        assert await reader.read() == b""
        writer.close()
        await running.until(lambda: running.gateway.admission.inflight == 0)


async def connections(running: Running) -> tuple[float, float]:
    text = (await running.client.get("/metrics")).text
    found = [
        re.search(rf"^{name} (\S+)$", text, re.M)
        for name in ("hotspare_client_connections", "hotspare_refused_connections_total")
    ]
    assert found[0]
    assert found[1]
    return float(found[0][1]), float(found[1][1])


async def test_more_connections_than_there_may_be(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_connections=3) as running, asyncio.timeout(10):
        assert await connections(running) == (1, 0)  # httpx's own, which it keeps
        inside = [await running.raw(b"") for _ in range(2)]
        await running.until(lambda: len(running.server.server_state.connections) == 3)
        reader, writer = await running.raw(POST + b"\r\n" + BODY)
        status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert await reader.read() == b""
        writer.close()
        for path in (b"/live", b"/health"):  # a full gateway lives, and says so
            reader, writer = await running.raw(b"GET %b HTTP/1.1\r\nhost: g\r\n\r\n" % path)
            status, headers, _ = await read_response(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await reader.read() == b""
            writer.close()
        reader, writer = inside[0]
        writer.write(POST + b"\r\n" + BODY)  # those that were there first are served
        assert (await read_response(reader))[0] == 200
        assert (await connections(running))[1] == 1
        for _, writer in inside:
            writer.close()
        await running.until(lambda: len(running.server.server_state.connections) == 1)
        reader, writer = await running.raw(POST + b"\r\n" + BODY)
        assert (await read_response(reader))[0] == 200
        writer.close()


async def test_a_surplus_connection_is_answered_once_in_a_pipeline_too(
    workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_connections=1) as running, asyncio.timeout(10):
        _, first = await running.raw(b"")
        await running.until(lambda: len(running.server.server_state.connections) == 1)
        live = b"GET /live HTTP/1.1\r\nhost: g\r\n\r\n"
        for next_one in (live, POST + b"\r\n" + BODY):
            reader, writer = await running.raw(live + next_one + live)
            status, headers, _ = await read_response(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await reader.read() == b""
            writer.close()
        await running.until(lambda: len(running.server.server_state.connections) == 1)
        await running.until(lambda: not running.server.server_state.tasks)
        assert running.gateway.admission.inflight == 0
        first.close()
    assert worker.calls == []
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == []


async def test_a_handshake_that_fails_leaves_no_connection_counted(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.clients.websocket.MAX_HEADERS", 1000)  # what its own parser refuses is reached, too
    (worker,) = await workers("pod-0")
    head = b"GET /v1/realtime?model=tiny HTTP/1.1\r\nhost: g\r\nconnection: upgrade\r\nupgrade: websocket\r\n%b\r\n"
    async with run_gateway(worker) as running, asyncio.timeout(10):
        for line in (b"x: \x01\r\n", b"x: y\r\n" * 130, b"x: %b\r\n" % (b"y" * 9000), b""):
            reader, writer = await running.raw(head % line)
            assert (await reader.read()).startswith(b"HTTP/1.1 4")
            writer.close()
        await running.until(lambda: not running.server.server_state.connections)
        assert (await connections(running))[0] == 1  # who asks


CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


async def curl(
    running: Running, heads: Path, path: str, *arguments: str, stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Status, head and body, as curl shows them. ``heads``: a file for what it does not show."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--max-time", "10", "--noproxy", "*", "--dump-header", str(heads)),
        *arguments,
        f"{running.base_url}{path}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = await process.communicate(stdin)
    assert process.returncode == 0, said
    head = await asyncio.to_thread(heads.read_bytes)
    last = head.rstrip().rpartition(b"\r\n\r\n")[2]
    return int(last.split()[1]), head, out


JSON = ("--header", "content-type: application/json")


@CURL
async def test_curl(workers: Any, tmp_path: Path) -> None:
    (worker,) = await workers("pod-0")
    large = tmp_path / "large.json"
    large.write_bytes(json.dumps({"model": MODEL, "padding": "x" * 2_000_000}).encode())
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(large.read_bytes()))
    completions = tmp_path / "heads", "/v1/completions"
    async with run_gateway(worker) as running:
        status, head, out = await curl(running, tmp_path / "heads", "/live", "--head")
        assert (status, out) == (200, head)
        status, _, out = await curl(running, *completions, *JSON, "--compressed", "--data-binary", BODY.decode())
        assert (status, b"from pod-0" in out) == (200, True)
        status, head, _ = await curl(  # a chunked upload, for which curl asks first
            running,
            *completions,
            *JSON,
            "--request",
            "POST",
            "--header",
            "expect: 100-continue",
            "-T",
            "-",
            stdin=large.read_bytes(),
        )
        assert status == 200
        assert head.startswith(b"HTTP/1.1 100 Continue\r\n")
        status, _, _ = await curl(running, *completions, *JSON, "--data-binary", f"@{large}")
        assert status == 200
        status, _, _ = await curl(
            running, *completions, *JSON, "--header", "content-encoding: gzip", "--data-binary", f"@{packed}"
        )
        assert status == 200
        for arguments in ((), ("--header", "connection: keep-alive")):
            status, head, _ = await curl(running, *completions, "--http1.0", *JSON, "--data", BODY.decode(), *arguments)
            assert (status, b"connection: close" in head) == (200, True)
        status, head, _ = await curl(running, *completions, "--request", "OPTIONS")
        assert (status, b"allow: OPTIONS, POST\r\n" in head) == (204, True)
        status, _, out = await curl(running, *completions, *JSON, "--header", "expect: x", "--data", BODY.decode())
        assert (status, json.loads(out)["error"]["code"]) == (417, "expectation_failed")
    whole = large.read_bytes()
    assert [call.body for call in worker.calls] == [BODY, whole, whole, whole, BODY, BODY]
    assert not any("content-encoding" in call.headers for call in worker.calls)


async def test_the_access_line_has_the_bytes_of_an_error_too() -> None:
    lines: list[bytes] = []
    async with run_gateway(workers="127.0.0.1:1", wait_for_worker_seconds=0.05) as running:
        running.gateway.intake.accounts.access_log = AccessLog(lines.append, "json")
        answers = [await running.client.post("/tokenize", content=content) for content in (b"[]", b"{}")]
        assert [answer.status_code for answer in answers] == [400, 503]
        await running.until(lambda: len(lines) == 2)
    assert [json.loads(line)["bytes"] for line in lines] == [len(answer.content) for answer in answers]
