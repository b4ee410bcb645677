"""API keys, through both shells: who is let in, what a refusal looks like, and that it costs the gateway nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.clients.asgi import client_of
from app.security import watched_files
from app.start_error import StartError
from app.telemetry.access_log import AccessLog
from tests.integration.app.conftest import Running, read_response, run_gateway

KEY, OTHER = "sk-first-0123456789", "sk-second-9876543210"
BEARER = {"authorization": f"Bearer {KEY}"}
WRONG = {"authorization": "Bearer sk-guess"}

pytestmark = pytest.mark.integration


async def status_of(gateway: Running, key: str) -> int:
    answer = await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code


@pytest.mark.parametrize(
    "headers", [BEARER, {"x-api-key": KEY}, {"authorization": f"bearer {OTHER}"}, BEARER | {"x-api-key": "wrong"}]
)
async def test_a_known_key_is_let_in(workers: Callable[..., Any], headers: dict[str, str]) -> None:
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=f"{KEY},{OTHER}") as gateway:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/status"):
            assert (await gateway.client.get(path, headers=headers)).status_code == 200, path
        answer = await gateway.client.post("/v1/chat/completions", json={"model": "tiny"}, headers=headers)
        assert answer.status_code == 200
    given = worker.calls[-1].headers
    assert not {"authorization", "x-api-key"} & given.keys()
    assert KEY not in str(given)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": f"Basic {KEY}"}])
async def test_anything_else_is_refused_in_the_envelope(workers: Callable[..., Any], headers: dict[str, str]) -> None:
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=KEY) as gateway:
        requests = [("GET", path) for path in ("/v1/models", "/metrics", "/status", "/nowhere", "/%6cive", "/live/")]
        for method, path in [*requests, ("POST", "/v1/chat/completions"), ("POST", "/live?x")]:
            content = b"{}" if method == "POST" else None
            answer = await gateway.client.request(
                method, path, content=content, headers=headers | {"x-request-id": "r"}
            )
            if path == "/live?x":
                assert answer.status_code == 405  # the probe's path, and no more of it
                continue
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"] == "r"
            error = answer.json()["error"]
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
            assert "sk-" not in answer.text
        for path in ("/live", "/health"):
            assert (await gateway.client.get(path, headers=headers)).status_code == 200
        metrics = (await gateway.client.get("/metrics", headers=BEARER)).text
        assert 'hotspare_gateway_errors_total{code="invalid_api_key",route="chat"} 1.0' in metrics
    assert worker.calls == []


async def test_the_access_line_of_a_refused_key_says_whose_it_was(workers: Callable[..., Any]) -> None:
    [worker] = await workers("pod-0")
    written: list[bytes] = []
    async with run_gateway(worker, api_keys=KEY) as gateway:
        gateway.gateway.intake.accounts.access_log = AccessLog(written.append, "json")
        for headers in (WRONG, {}, BEARER):
            await gateway.client.post("/tokenize", json={"model": "tiny"}, headers=headers)
        with pytest.raises(InvalidStatus, match="401"):
            async with connect(
                f"ws://127.0.0.1:{gateway.port}/v1/realtime?model=tiny", additional_headers=WRONG, proxy=None
            ):
                pass
    lines = [json.loads(line) for line in written]
    assert [(line["route"], line["status"], line.get("client")) for line in lines] == [
        ("tokenize", 401, "127.0.0.1"),
        ("tokenize", 401, "127.0.0.1"),
        ("tokenize", 200, None),
        ("realtime", 401, "127.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (None, ""),
        (("192.0.2.7", 80), "192.0.2.7"),
        (("fe80::1%eth0", 80), "fe80::1%eth0"),
        (("", 0), ""),
        (("1.2.3.4 error=none\n", 0), ""),
    ],
)
def test_the_client_that_any_server_names(client: object, said: str, shell: str) -> None:
    assert client_of({"type": "http", "client": client}) == said
    assert client_of({"type": "http"}) == ""


async def test_a_refused_body_is_not_read(workers: Callable[..., Any], shell: str) -> None:
    """Refused with the head, before the body is sent; the connection closes, for nobody knows where that would end.
    Whether it does under ASGI is the server's affair."""
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=KEY) as gateway:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
        )
        reader, writer = await gateway.raw(head)
        async with asyncio.timeout(5):
            status, headers, body = await read_response(reader)
            assert status == 401
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            if shell == "direct":
                assert headers["connection"] == "close"
                assert await reader.read() == b""
        writer.close()
        assert gateway.gateway.admission.inflight == 0


async def test_a_refusal_comes_before_the_limit_of_requests(workers: Callable[..., Any]) -> None:
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=KEY, max_inflight=1) as gateway:
        with gateway.gateway.admission.admit():
            wrong = await gateway.client.post("/tokenize", json={})
            right = await gateway.client.post("/tokenize", json={}, headers=BEARER)
        assert (wrong.status_code, right.status_code) == (401, 429)


async def test_a_connection_goes_on_after_a_refusal_without_a_body(workers: Callable[..., Any]) -> None:
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=KEY) as gateway:
        request = b"POST /tokenize HTTP/1.1\r\nhost: g\r\n%bcontent-length: 2\r\n\r\n{}"
        reader, writer = await gateway.raw(request % b"" + request % f"authorization: Bearer {KEY}\r\n".encode())
        async with asyncio.timeout(5):
            statuses = [(await read_response(reader))[0]]
            if not reader.at_eof():
                statuses.append((await read_response(reader))[0])
        writer.close()
        assert statuses in ([401, 200], [401])


async def test_keys_are_exchanged_without_a_restart(
    workers: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.01)
    [worker] = await workers("pod-0")
    path = tmp_path / "keys"

    def write(text: str) -> None:
        (tmp_path / "draft").write_text(text)
        os.replace(tmp_path / "draft", path)

    write(f"# in use\n{KEY}\n")
    with caplog.at_level(logging.INFO):
        async with run_gateway(worker, api_keys="from-the-variable", api_keys_file=str(path)) as gateway:
            keys = gateway.gateway.access.keys
            assert keys is not None
            assert await status_of(gateway, KEY) == await status_of(gateway, "from-the-variable") == 200
            write(f"{KEY}\n{OTHER}\n")
            await gateway.until(lambda: len(keys) == 3)
            assert await status_of(gateway, KEY) == await status_of(gateway, OTHER) == 200
            write(f"{OTHER}\n")
            await gateway.until(lambda: len(keys) == 2)
            assert (await status_of(gateway, KEY), await status_of(gateway, OTHER)) == (401, 200)
            # What cannot be used changes nothing, and is said.
            write(f"{KEY} with spaces\n")
            await gateway.until(lambda: "line 1 is not a key" in caplog.text)
            path.unlink()
            await gateway.until(lambda: "cannot be read" in caplog.text)
            assert (await status_of(gateway, KEY), await status_of(gateway, OTHER)) == (401, 200)
            write("")  # but an empty file is an answer: nobody
            await gateway.until(lambda: len(keys) == 1)
            warning = f"{path} holds no key any more: only those of api_keys are let in"
            await gateway.until(lambda: ("WARNING", warning) in said(caplog))
            await gateway.until(lambda: ("INFO", "1 API key is known now") in said(caplog))
            assert (await status_of(gateway, OTHER), await status_of(gateway, "from-the-variable")) == (401, 200)
    assert "sk-" not in caplog.text


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_who_guesses_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """On every route, in a metric and in a line a second at most; who shows no key does not guess."""
    wrong = {"x-api-key": "sk-guess"}
    with caplog.at_level(logging.INFO):
        async with run_gateway(workers="127.0.0.1:1", api_keys=KEY) as gateway:
            await gateway.client.get("/v1/models")
            assert "API key" not in caplog.text
            for path in ("/v1/models", "/nowhere", "/metrics"):
                assert (await gateway.client.get(path, headers=wrong)).status_code == 401
            assert (await gateway.client.post("/tokenize", headers=wrong, content=b"{}")).status_code == 401
            assert (await gateway.client.get("/nowhere", headers=BEARER)).status_code == 404
            assert (await gateway.client.post("/status", headers=BEARER)).status_code == 405
            metrics = (await gateway.client.get("/metrics", headers=BEARER)).text
    for labels, count in (
        ('code="invalid_api_key",route=""', 4),
        ('code="invalid_api_key",route="tokenize"', 1),
        ('code="not_found",route=""', 1),
        ('code="method_not_allowed",route=""', 1),
    ):
        assert f"hotspare_gateway_errors_total{{{labels}}} {count}.0\n" in metrics
    lines = [line for line in said(caplog) if "wrong API key" in line[1]]
    assert lines[0] == ("INFO", "1 request with a wrong API key refused, from 127.0.0.1")
    assert len(lines) <= 2  # a busy machine may have taken a second over it
    assert "sk-guess" not in caplog.text


def test_a_file_without_keys_refuses_to_start(tmp_path: Path, shell: str) -> None:
    from app.factory import create_app
    from app.settings import GatewaySettings

    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(StartError, match=r"holds no key.*HOTSPARE_API_KEYS_FILE"):
        create_app(GatewaySettings(api_keys_file=path))
    with pytest.raises(StartError, match="cannot be read"):
        create_app(GatewaySettings(api_keys_file=tmp_path / "none"))


async def test_the_openai_sdk(workers: Callable[..., Any]) -> None:
    [worker] = await workers("pod-0")
    async with run_gateway(worker, api_keys=KEY) as gateway:
        url = f"{gateway.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as right:
            done = await right.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
            assert done.choices[0].message.content == "from pod-0"
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-wrong") as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                await wrong.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
    assert len(worker.calls) == 1  # none was tried again


async def test_nothing_says_a_key(workers: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    [worker] = await workers("pod-0")
    with caplog.at_level(logging.DEBUG):
        async with run_gateway(worker, api_keys=KEY) as gateway:
            pages = [await gateway.client.get(path, headers=BEARER) for path in ("/status", "/metrics", "/health")]
            await gateway.chat()
            await gateway.client.post("/v1/chat/completions", json={}, headers={"x-api-key": "sk-wrong"})
            assert KEY not in repr(gateway.gateway.settings)
    assert not any("sk-" in page.text for page in pages)
    assert "invalid_api_key" in caplog.text or "401" in caplog.text
    assert "sk-" not in caplog.text


@pytest.mark.parametrize("offers", [b"realtime", b"realtime, openai-insecure-api-key.sk-wrong"])
@pytest.mark.parametrize("can_answer", [True, False])
async def test_a_websocket_is_refused_before_it_is_one(
    workers: Callable[..., Any], offers: bytes, can_answer: bool
) -> None:
    from app.factory import create_app
    from app.settings import GatewaySettings

    app = create_app(GatewaySettings(api_keys=KEY))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "raw_path": b"/v1/realtime",
        "headers": [(b"sec-websocket-protocol", offers)],
        "extensions": {"websocket.http.response": {}} if can_answer else {},
    }
    await app(scope, receive, send)
    if can_answer:
        assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 401)
        assert b"invalid_api_key" in sent[1]["body"]
    else:
        assert sent == [{"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"}]
