"""Realtime sessions through the server: the ``openai`` package's client, and a plain WebSocket for what that cannot
send."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient, WebSocketDenialResponse
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.cli.door import trust_only
from app.clients.websocket import WebSocketProtocol
from app.factory import create_app
from app.lifecycle import Lifecycle
from app.settings import GatewaySettings
from tests.integration.app.conftest import PATIENCE_SECONDS, Running, read_response, run_gateway, until
from tests.integration.app.fake_worker import (
    MODEL,
    STREAM_HEAD,
    Call,
    FakeWorker,
    answers,
    chunk,
    event,
    hangs,
    streams,
    streams_then_waits,
)
from tests.support.certificates import make_pair

ServerEvent: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
SAID: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


@pytest.fixture
def shell() -> None:
    """A WebSocket is the same in both."""


@asynccontextmanager
async def sdk(running: Running) -> AsyncIterator[Any]:
    async with (
        AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="k") as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        yield connection


class Plain:
    """A session over a plain WebSocket. Every event is checked with the types of the ``openai`` package."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **more: Any) -> None:
        await self.socket.send(json.dumps({"type": kind} | more))

    async def read(self) -> Any:
        async with asyncio.timeout(5):
            data = await self.socket.recv()
        ServerEvent.validate_json(data)
        return json.loads(data)

    async def until(self, kind: str) -> tuple[Any, list[str]]:
        """The next event of this type, and the types of those before it."""
        before: list[str] = []
        while (found := await self.read())["type"] != kind:
            before.append(found["type"])
        return found, before

    async def ask(self, **response: Any) -> None:
        await self.send("conversation.item.create", item=SAID)
        await self.send("response.create", response=response)

    async def close_code(self) -> int:
        with pytest.raises(ConnectionClosed) as closed:
            await self._read_on()
        assert closed.value.rcvd is not None, "the connection broke"
        return closed.value.rcvd.code

    async def _read_on(self) -> None:
        async with asyncio.timeout(5):
            while True:
                await self.socket.recv()


@asynccontextmanager
async def plain(
    running: Running, *, query: str = f"model={MODEL}", tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[Plain]:
    url = f"{'ws' if tls is None else 'wss'}://127.0.0.1:{running.port}/v1/realtime?{query}"
    async with connect(url, proxy=None, ssl=tls, **options) as socket:
        session = Plain(socket)
        assert (await session.read())["type"] == "session.created"
        yield session


def ends_with(usage: dict[str, Any], finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": finish_reason}
    last = {"choices": [choice]}, {"choices": [], "usage": usage}
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in last)


async def gone(running: Running) -> None:
    """Nothing of any session is left."""
    await running.until(lambda: running.gateway.sessions.count == 0 and running.gateway.admission.inflight == 0)
    await running.until(lambda: not any(_is_websocket(c) for c in running.server.server_state.connections))


def _is_websocket(connection: object) -> bool:
    return type(connection).__name__ == "WebSocketProtocol"


# The openai package


async def test_the_openai_client(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    worker.will(streams(event("Hel"), event("lo"), ends_with(usage)))
    async with run_gateway(worker) as running:
        async with sdk(running) as connection:
            await connection.session.update(
                session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]}
            )
            await connection.conversation.item.create(item=SAID)
            await connection.response.create(response={"max_output_tokens": 9, "metadata": {"a": "b"}})
            seen = []
            async for found in connection:
                seen.append(found)
                if found.type == "response.done":
                    break
            assert [found.type for found in seen] == [
                "session.created",
                "session.updated",
                "conversation.item.added",
                "conversation.item.done",
                "response.created",
                "response.output_item.added",
                "conversation.item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "conversation.item.done",
                "response.output_item.done",
                "response.done",
            ]
            done = seen[-1].response
            assert (done.status, done.output[0].content[0].text, done.metadata) == ("completed", "Hello", {"a": "b"})
            assert (done.usage.total_tokens, done.usage.input_token_details.cached_tokens) == (9, 3)
            # The next response knows the first, and is still told what the session was told.
            await connection.conversation.item.create(item=SAID)
            await connection.response.create()
            async for found in connection:
                if found.type == "response.done":
                    break
        await gone(running)
        metrics = (await running.client.get("/metrics")).text
        assert f'hotspare_requests_total{{model="{MODEL}",route="realtime",status="200"}} 2.0' in metrics
        assert "hotspare_realtime_sessions 0.0" in metrics
    first, second = (call.json for call in worker.calls)
    assert worker.calls[0].target == "/v1/chat/completions"
    assert worker.calls[0].headers["x-request-id"] == done.id
    assert (first["model"], first["max_completion_tokens"]) == (MODEL, 9)
    assert (first["stream"], first["stream_options"]) == (True, {"include_usage": True})
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}
    assert first["messages"] == [system, asked]
    assert second["messages"] == [system, asked, {"role": "assistant", "content": "Hello"}, asked]


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # how that package opens a WebSocket
async def test_the_openai_client_without_a_loop(workers: Any) -> None:
    (worker,) = await workers("pod-0")

    def talk(base_url: str) -> str:
        text = ""
        with OpenAI(base_url=base_url, api_key="k") as client, client.realtime.connect(model=MODEL) as connection:
            connection.conversation.item.create(item=SAID)
            connection.response.create()
            for found in connection:
                if found.type == "response.output_text.delta":
                    text += found.delta
                if found.type == "response.done":
                    return text
        raise AssertionError(text)

    async with run_gateway(worker) as running:
        assert await asyncio.to_thread(talk, f"{running.base_url}/v1") == "from pod-0 done"
        await gone(running)


async def test_the_openai_client_sees_why_it_was_refused(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        async with AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="k") as client:
            with pytest.raises(InvalidStatus) as refused:
                async with client.realtime.connect(model="nobody"):
                    pass
        assert refused.value.response.status_code == 404
        assert json.loads(refused.value.response.body or b"")["error"]["code"] == "model_not_found"


# Items, responses out of band, tools


async def test_items_come_and_go(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, plain(running) as session:
        for name, before in (("b", None), ("a", "root"), ("c", "b")):
            await session.send("conversation.item.create", item=SAID | {"id": name}, previous_item_id=before)
        added = [await session.until("conversation.item.added") for _ in range(3)]
        assert [found["previous_item_id"] for found, _ in added] == [None, None, "b"]
        await session.send("conversation.item.retrieve", item_id="c")
        assert (await session.until("conversation.item.retrieved"))[0]["item"]["id"] == "c"
        await session.send("conversation.item.delete", item_id="a")
        assert (await session.until("conversation.item.deleted"))[0]["item_id"] == "a"
        await session.send("conversation.item.retrieve", item_id="a", event_id="mine")
        error = (await session.until("error"))[0]["error"]
        assert (error["code"], error["event_id"], error["param"]) == ("item_not_found", "mine", "item_id")


async def test_a_response_out_of_band_beside_one_in_the_conversation(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("slow")))
    async with run_gateway(worker) as running, plain(running) as session:
        await session.ask()
        await session.until("response.output_text.delta")
        await session.send("response.create", event_id="too much")
        error = (await session.until("error"))[0]["error"]
        assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "too much")
        await session.send(
            "response.create", response={"conversation": "none", "input": [SAID], "instructions": "Classify."}
        )
        aside, before = await session.until("response.done")
        assert aside["response"]["conversation_id"] is None
        assert "conversation.item.added" not in before
        worker.calls[0].go.set()
        main, _ = await session.until("response.done")
        assert main["response"]["output"][0]["content"][0]["text"] == "slow"
    assert [message["content"] for message in worker.calls[1].json["messages"]] == ["Classify.", "hi"]


async def test_a_call_of_a_tool(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    parts: list[dict[str, Any]] = [
        {"content": "Let me see."},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"ci'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ty":1}'}}]},
    ]
    pieces = [b"data: " + json.dumps({"choices": [{"index": 0, "delta": part}]}).encode() + b"\n\n" for part in parts]
    worker.will(streams(*pieces))
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    async with run_gateway(worker) as running, plain(running) as session:
        await session.send("session.update", session={"type": "realtime", "tools": [tool], "tool_choice": "auto"})
        await session.ask()
        called, before = await session.until("response.function_call_arguments.done")
        assert (called["name"], called["call_id"], called["arguments"]) == ("weather", "call-1", '{"city":1}')
        assert before.count("response.function_call_arguments.delta") == 2
        await session.until("response.done")
        await session.send(
            "conversation.item.create",
            item={"type": "function_call_output", "call_id": "call-1", "output": "rain"},
        )
        await session.send("response.create")
        await session.until("response.done")
    function = {"name": "weather", "arguments": '{"city":1}'}
    assert worker.calls[0].json["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    assert worker.calls[1].json["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]


# What clients do wrong


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x00binary", "binary_frame"),
        ("{", "invalid_json"),
        ("", "invalid_json"),
        ("[]", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("{}", "missing_type"),
        ('{"type":"sing"}', "unknown_event"),
        ('{"type":"response.create","loud":true}', "invalid_value"),
        ('{"type":"response.create","response":{"temperature":1}}', "invalid_value"),
        ('{"type":"response.create"}', "empty_conversation"),
        ('{"type":"response.cancel"}', "response_cancel_not_active"),
        ('{"type":"input_audio_buffer.append","audio":"AAAA"}', "audio_not_supported"),
        (
            '{"type":"session.update","session":{"type":"realtime","output_modalities":["audio"]}}',
            "audio_not_supported",
        ),
        ('{"type":"session.update","session":{"type":"transcription"}}', "not_supported"),
        ('{"type":"sing","x":"' + "é" * 20_000 + '"}', "event_too_large"),
    ],
)
async def test_an_error_is_an_event_and_the_session_goes_on(workers: Any, frame: str | bytes, code: str) -> None:
    (worker,) = await workers("pod-0")
    limit = 200_000 if code == "invalid_json" else 32_768
    async with run_gateway(worker, max_realtime_event_bytes=limit) as running, plain(running) as session:
        await session.socket.send(frame)
        assert (await session.read())["error"]["code"] == code
        await session.ask()
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


async def test_an_error_names_its_event_where_that_is_known(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, plain(running) as session:
        for frame, event_id in (
            ('{"event_id":"mine"}', "mine"),
            ('{"event_id":"mine","type":"sing"}', "mine"),
            ('{"event_id":"mine"', None),
        ):
            await session.socket.send(frame)
            assert (await session.read())["error"]["event_id"] == event_id


async def test_a_message_that_is_far_too_large_closes_the_connection(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_realtime_event_bytes=10_000) as running, plain(running) as session:
        await session.socket.send(["x" * 8_000] * 4)  # in fragments
        assert await session.close_code() == 1009
        await gone(running)


async def test_a_conversation_is_bounded(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams(*[event("y" * 3_000)] * 3))
    async with run_gateway(worker, max_realtime_conversation_bytes=8_192) as running, plain(running) as session:
        large = SAID | {"content": [{"type": "input_text", "text": "x" * 5_000}]}
        await session.send("conversation.item.create", item=large | {"id": "first"})
        await session.send("conversation.item.create", item=large)
        assert (await session.until("error"))[0]["error"]["code"] == "conversation_too_large"
        await session.send("response.create")
        done = (await session.until("response.done"))[0]["response"]
        assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "response_too_large")
        await session.send("conversation.item.delete", item_id="first")
        await session.until("conversation.item.deleted")
        await session.ask()
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


# The handshake

PATH = f"/v1/realtime?model={MODEL}"
KEYS = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


async def handshake(running: Running, target: str, headers: dict[str, str]) -> tuple[int, dict[str, str], Any]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "g"} | headers).items())
    reader, writer = await running.raw(f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
    async with asyncio.timeout(5):
        status, found, body = await read_response(reader)
    writer.close()
    return status, found, json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("target", "headers", "status", "code"),
    [
        ("/v1/realtime", {}, 400, "missing_required_parameter"),
        (f"{PATH}&model=x", {}, 400, "missing_required_parameter"),
        ("/v1/realtime?model=nobody", {}, 404, "model_not_found"),
        ("/v1/%72ealtime", {}, 404, "not_found"),
        (PATH, {"openai-beta": "realtime=v1"}, 400, "beta_not_supported"),
        (PATH, {"sec-websocket-protocol": "realtime, openai-beta.realtime-v1"}, 400, "beta_not_supported"),
        (PATH, {"origin": "http://elsewhere"}, 403, "origin_not_allowed"),
        (PATH, {"origin": "http://[elsewhere"}, 403, "origin_not_allowed"),
        (PATH, {"origin": "null"}, 403, "origin_not_allowed"),
        (PATH, {"sec-websocket-key": "short"}, 400, "bad_handshake"),
        (PATH, {"sec-websocket-version": "12"}, 400, "bad_handshake"),
        (PATH, {"upgrade": "h2c"}, 426, "upgrade_required"),
        (PATH, {"content-length": "0"}, 426, "upgrade_required"),
        (PATH, {"cookie": "x" * 8_100}, 431, "head_too_large"),
        (PATH, {f"x-{n}": "y" for n in range(130)}, 400, "malformed_request"),
    ],
)
async def test_a_handshake_that_is_refused(
    workers: Any, caplog: pytest.LogCaptureFixture, target: str, headers: dict[str, str], status: int, code: str
) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        await running.until(lambda: bool(running.gateway.registry.candidates(MODEL)))
        found, answer, said = await handshake(running, target, KEYS | headers)
        assert (found, said, answer["content-type"]) == (status, code, "application/json")
        assert (await running.chat()).status_code == 200
        await gone(running)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_the_access_line_of_a_refused_handshake_has_its_bytes(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = await workers("pod-0")
    reports: list[Any] = []
    async with run_gateway(worker, api_keys="sesame") as running:
        monkeypatch.setattr(
            running.gateway.intake.accounts, "close", lambda route, request_id, report, started: reports.append(report)
        )
        _, answer, _ = await handshake(running, PATH, KEYS)
        assert [report.bytes for report in reports] == [int(answer["content-length"])] != [0]


async def test_a_plain_request_is_told_to_upgrade(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.client.get(PATH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")
        assert answer.headers["upgrade"] == "websocket"


async def test_a_handshake_that_is_accepted(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        origin = f"http://127.0.0.1:{running.port}"
        chosen: Any = ["other", "realtime"]
        async with plain(
            running, subprotocols=chosen, origin=origin, additional_headers={"x-request-id": "mine"}
        ) as session:
            assert session.socket.subprotocol == "realtime"
            assert session.socket.response is not None
            assert session.socket.response.headers["x-request-id"] == "mine"
            assert "sec-websocket-extensions" not in session.socket.response.headers


async def test_api_keys(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    browser: Any = {"subprotocols": ["realtime", "openai-insecure-api-key.sesame"], "origin": "http://elsewhere"}
    async with run_gateway(worker, api_keys="sesame,old") as running:
        assert (await handshake(running, PATH, KEYS))[::2] == (401, "invalid_api_key")
        refused = await handshake(running, PATH, KEYS | {"authorization": "Bearer wrong"})
        assert refused[::2] == (401, "invalid_api_key")
        async with plain(running, **browser) as session:
            assert session.socket.subprotocol == "realtime"
            await session.ask()
            assert (await session.until("response.done"))[0]["response"]["status"] == "completed"
        async with plain(running, additional_headers={"authorization": "Bearer old"}) as session:
            keys = running.gateway.access.keys
            assert keys is not None
            keys.replace(["sesame"])
            await session.ask()
            response = (await session.until("response.done"))[0]["response"]
            assert response["status_details"]["error"]["code"] == "invalid_api_key"
    assert len(worker.calls) == 1
    assert "sesame" not in str(worker.calls[0].headers)


async def test_frames_that_come_with_the_handshake_and_byte_by_byte(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "g"} | KEYS).items())
    text = b'{"type":"response.cancel","event_id":"early"}'
    frame = bytes([0x81, 0x80 | len(text)]) + bytes(4) + text  # masked with zeros
    whole = f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + frame
    async with run_gateway(worker) as running, asyncio.timeout(10):
        for pieces in ([whole], [bytes([byte]) for byte in whole]):
            reader, writer = await running.raw(b"")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            await reader.readuntil(b'"event_id":"early"')
            writer.close()
        await gone(running)


async def test_sessions_are_limited(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_realtime_sessions=1) as running:
        async with plain(running):
            status, headers, code = await handshake(running, PATH, KEYS)
            assert (status, code, headers["retry-after"]) == (429, "overloaded", "1")
        await gone(running)
        async with plain(running):
            pass


# Workers come and go


async def test_a_session_outlives_its_worker(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    for worker in (one, two):
        worker.default = streams_then_waits(event("a"))
    async with run_gateway(one, two) as running, plain(running) as session:
        await session.ask()
        await session.until("response.output_text.delta")
        first, second = (one, two) if one.calls else (two, one)
        await first.die()
        done, before = await session.until("response.done")
        assert before[0] == "response.output_text.done"
        assert (done["response"]["status"], done["response"]["output"][0]["status"]) == ("failed", "incomplete")
        assert done["response"]["status_details"]["error"]["code"] == "worker_lost"
        second.default = streams(event("b"))
        await session.send("response.create")
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"
    assert [message["content"] for message in second.calls[0].json["messages"]] == ["hi", "a"]


async def test_a_worker_that_dies_unseen_costs_nothing(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    for worker in (one, two):
        worker.will(hangs)
    async with run_gateway(one, two) as running, plain(running) as session:
        await session.ask()
        await running.until(lambda: bool(one.calls or two.calls))
        first, second = (one, two) if one.calls else (two, one)
        await first.die()
        await second.call()
        second.calls[0].cut(reset=True)  # breaks, too; and is there again
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (answers(400, {"error": {"message": "too long", "type": "x", "param": None, "code": "context"}}), "context"),
        (answers(500, {"detail": "?"}), "internal_error"),
        (answers(400, {"error": "broken"}), "bad_answer"),
        (streams(b'data: {"error":{"message":"m","type":"t","code":500}}\n\n'), "500"),
        (streams(b'event: error\ndata: {"type":"error","error":{"message":"m","code":"c"}}\n\n'), "c"),
    ],
)
async def test_a_worker_that_refuses(workers: Any, behaviour: Any, code: str) -> None:
    (worker,) = await workers("pod-0")
    worker.will(behaviour)
    async with run_gateway(worker) as running, plain(running) as session:
        await session.ask()
        response = (await session.until("response.done"))[0]["response"]
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", code)
        await session.send("response.create")
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


UNREADABLE = {
    "no JSON": b"data: not json\n\n",
    "no UTF-8": b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
    "another type of text": b'data: {"choices":[{"delta":{"content":5}}]}\n\n',
    "another type of usage": b'data: {"choices":[],"usage":{"prompt_tokens":"x"}}\n\n',
    "no choices": b'data: {"choices":null}\n\n',
    "a list": b"data: [1]\n\n",
    "an object of something else": b'data: {"x":1}\n\n',
    "deep nesting": b"data: " + b"[" * 100_000 + b"\n\n",
    "an error of another type": b'data: {"error":"broken"}\n\n',
    "an error that says nothing": b'event: error\ndata: {"x":1}\n\n',
    "an error that is a chunk": b"event: error\n" + event("x"),
    "an error without data": b"event: error\n\n",
}


@pytest.mark.parametrize("bad", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("ends", [True, False], ids=["to its end", "without an end"])
async def test_an_event_that_cannot_be_read_fails_the_response(workers: Any, bad: bytes, ends: bool) -> None:
    (worker,) = await workers("pod-0")
    pieces = [event("said"), bad, event("unsaid")]
    worker.will(streams(*pieces) if ends else streams_then_waits(*pieces))
    async with run_gateway(worker) as running, plain(running) as session:
        await session.ask()
        response, before = await session.until("response.done")
        response = response["response"]
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "bad_answer")
        assert [part["text"] for item in response["output"] for part in item["content"]] == ["said"]
        assert before.count("response.output_text.delta") == 1
        await running.until(lambda: running.gateway.admission.inflight == 0)
        if not ends:
            await asyncio.wait_for(worker.calls[0].closed.wait(), 5)
        await session.send("response.create")  # the session goes on
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


async def test_events_that_say_nothing_of_a_response_are_passed_over(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams(b": comment\n\n", b"event: ping\n\n", b'data: {"choices":[]}\n\n', event("said")))
    async with run_gateway(worker) as running, plain(running) as session:
        await session.ask()
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


async def test_a_worker_that_answers_no_stream(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.default = answers(200)
    async with run_gateway(worker, resume_limit=1) as running, plain(running) as session:
        await session.ask()
        response = (await session.until("response.done"))[0]["response"]
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "bad_answer")
        assert len(worker.calls) == 2


async def test_a_response_needs_room_like_any_request(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_inflight=1) as running, plain(running) as session:
        token = running.gateway.admission.admit()
        await session.ask()
        response = (await session.until("response.done"))[0]["response"]
        assert response["status_details"]["error"]["code"] == "overloaded"
        token.release()
        await session.send("response.create")
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


async def test_a_request_that_is_larger_than_a_body_may_be(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_body_bytes=2_000) as running, plain(running) as session:
        await session.ask(instructions="x" * 2_000)
        response = (await session.until("response.done"))[0]["response"]
        assert response["status_details"]["error"]["code"] == "body_too_large"
        await session.send("response.create")
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


# Clients leave, cancel, or do not read

LIMIT_SECONDS = 0.1
TRIES = 5
"""The best one of them counts: it shows the way that the code takes, and a busy machine may be late."""


async def test_cancel_ends_the_response_at_the_worker(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    took: list[float] = []
    async with run_gateway(worker) as running, plain(running) as session:
        while len(took) < TRIES and min(took, default=LIMIT_SECONDS) >= LIMIT_SECONDS:
            worker.will(streams_then_waits(event("a")))
            await session.ask()
            await session.until("response.output_text.delta")
            asked_at = time.monotonic()
            await session.send("response.cancel")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await worker.calls[-1].closed.wait()
            took.append(time.monotonic() - asked_at)
            response = (await session.until("response.done"))[0]["response"]
            assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert min(took) < LIMIT_SECONDS, took
        await session.send("response.create")
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_its_response_at_the_worker(workers: Any, phase: str, how: str) -> None:
    (worker,) = await workers("pod-0")
    took: list[float] = []
    async with run_gateway(worker) as running:
        while len(took) < TRIES and min(took, default=LIMIT_SECONDS) >= LIMIT_SECONDS:
            worker.will(hangs if phase == "prefill" else streams_then_waits(event("a")))
            async with plain(running) as session:
                await session.ask()
                call = await worker.call(len(took))
                if phase == "decode":
                    await session.until("response.output_text.delta")
                left_at = time.monotonic()
                if how == "abort":
                    session.socket.transport.abort()
                else:
                    closing = asyncio.create_task(session.socket.close())
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await call.closed.wait()
                took.append(time.monotonic() - left_at)
                await gone(running)
                if how == "close":
                    await closing
    assert min(took) < LIMIT_SECONDS, took


async def endless(call: Call) -> None:
    await call.send(STREAM_HEAD)
    while not call.closed.is_set():
        await call.send(chunk(event("x" * 50_000)))


@asynccontextmanager
async def stuck(running: Running, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Plain, Any]]:
    """A client that can be made to read nothing, and the gateway's side of it. Little fits between the two."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", running.port))
    async with plain(running, max_queue=1, ping_interval=None, sock=narrow, tls=tls) as session:
        (connection,) = running.gateway.sessions._connections
        yield session, connection
        await until(lambda: connection.paused, 20)
        assert connection._queued_bytes < 1 << 20
        await until(lambda: running.gateway.sessions.count == 0, 20)
        session.socket.transport.abort()


async def test_a_client_that_reads_nothing_is_given_up(workers: Any) -> None:
    """Until then the worker waits, and little is kept."""
    (worker,) = await workers("pod-0")
    worker.will(endless)
    limits = {"client_write_timeout_seconds": 0.5, "max_realtime_conversation_bytes": 1 << 30}
    async with run_gateway(worker, **limits) as running:
        async with stuck(running) as (session, _):
            await session.ask()
            await session.until("response.output_text.delta")
            session.socket.transport.pause_reading()
        await running.until(lambda: running.gateway.admission.inflight == 0)
        await running.until(worker.calls[0].writer.is_closing)


async def test_a_client_that_asks_and_reads_nothing_is_not_listened_to(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    item = SAID | {"id": "i", "content": [{"type": "input_text", "text": "y" * 500_000}]}

    async def ask_on(session: Plain) -> None:
        while True:
            await session.send("conversation.item.retrieve", item_id="i")

    async with run_gateway(worker, client_write_timeout_seconds=0.5) as running:
        async with stuck(running) as (session, _):
            await session.send("conversation.item.create", item=item)
            session.socket.transport.pause_reading()
            asking = asyncio.create_task(ask_on(session))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_client_that_pings_and_reads_nothing_is_not_listened_to(workers: Any) -> None:
    """Its pings stay where they are, and are answered once it reads."""
    (worker,) = await workers("pod-0")
    ping = bytes([0x89, 0x80 | 125, 0, 0, 0, 0]) + b"p" * 125
    pong = bytes([0x8A, 125]) + b"p" * 125
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "g"} | KEYS).items())
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    async with run_gateway(worker) as running, asyncio.timeout(20):
        await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", running.port))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=4096)
        writer.write(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = (c for c in running.server.server_state.connections if _is_websocket(c))
        sent = 0
        while connection.writable.is_set() or connection.transport.is_reading():
            writer.write(ping * 1000)
            sent += 1000
            await asyncio.sleep(0)
        writer.write(ping * 10_000)
        sent += 10_000
        for _ in range(100):
            await asyncio.sleep(0.001)
            assert connection.transport.get_write_buffer_size() < 1 << 20
        answered = 0
        while answered < sent * len(pong):
            answered += len(await reader.read(1 << 20))
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_vanishes_is_noticed(workers: Any) -> None:
    """Nothing ever says that it is gone: it does not answer a ping."""
    (worker,) = await workers("pod-0")
    worker.will(hangs)
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "g"} | KEYS).items())
    texts = [json.dumps({"type": "conversation.item.create", "item": SAID}), '{"type":"response.create"}']
    async with run_gateway(worker, ping_seconds=0.3) as running, asyncio.timeout(10):
        reader, writer = await running.raw(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode())
        for text in texts:
            writer.write(bytes([0x81, 0x80 | 126]) + len(text).to_bytes(2, "big") + bytes(4) + text.encode())
        call = await worker.call()
        await call.closed.wait()
        await gone(running)
        assert b"\x88" in await reader.read()  # a close frame, of a server that gives up
        writer.close()


# The drain


async def test_drain_closes_sessions_that_are_idle(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, drain_timeout_seconds=5) as running, plain(running) as session:
        running.server.request_drain()
        told = await session.read()
        assert (told["error"]["code"], told["error"]["type"]) == ("draining", "server_error")
        await session.ask(conversation="none")
        assert (await session.until("error"))[0]["error"]["code"] == "draining"
        assert await session.close_code() == 1001
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0
        assert running.gateway.lifecycle.state is Lifecycle.STOPPED


async def test_drain_lets_a_response_end(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, drain_timeout_seconds=10) as running, plain(running) as session:
        await session.ask()
        await session.until("response.output_text.delta")
        running.server.request_drain()
        await session.until("error")
        status, headers, code = await handshake(running, PATH, KEYS)
        assert (status, code) == (503, "draining")
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        assert running.gateway.lifecycle.state is Lifecycle.DRAINING
        worker.calls[0].go.set()
        assert (await session.until("response.done"))[0]["response"]["status"] == "completed"
        assert await session.close_code() == 1001
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0


async def test_drain_that_runs_out_of_time(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker, drain_timeout_seconds=0.2) as running, plain(running) as session:
        async with plain(running) as idle:
            await session.ask()
            await session.until("response.output_text.delta")
            running.server.request_drain()
            response = (await session.until("response.done"))[0]["response"]
            assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "draining")
            assert await session.close_code() == 1001
            assert await idle.close_code() == 1001
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running.task
        assert running.server.exit_code == 0


async def test_drain_does_not_wait_for_a_client_that_does_not_answer_its_close(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    lines = "".join(f"{name}: {value}\r\n" for name, value in ({"host": "g"} | KEYS).items())
    async with run_gateway(worker, drain_timeout_seconds=1) as running:
        reader, writer = await running.raw(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode())
        await reader.readuntil(b"session.created")
        running.server.request_drain()
        async with asyncio.timeout(5):
            await running.task
        assert running.server.exit_code == 0
        writer.close()


# Over TLS


async def test_over_tls(workers: Any, tmp_path: Path) -> None:
    """A response, a client that reads nothing, a drain."""
    (worker,) = await workers("pod-0")
    pair = make_pair(tmp_path / "tls")
    trusted = trust_only(pair.certificate)
    limits: dict[str, Any] = {"client_write_timeout_seconds": 0.5, "max_realtime_conversation_bytes": 1 << 30}
    limits |= {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key), "drain_timeout_seconds": 5}
    async with run_gateway(worker, **limits) as running:
        async with plain(running, tls=trusted) as session:
            await session.ask()
            assert (await session.until("response.done"))[0]["response"]["status"] == "completed"
        await gone(running)
        worker.will(endless)
        async with stuck(running, trusted) as (session, _):
            await session.ask()
            await session.until("response.output_text.delta")
            session.socket.transport.pause_reading()
            # What the socket does not take waits behind TLS, too: little of it.
            server = side(running, session)
            await until(lambda: unsent(server)[1] > 0, 20)
            assert sum(unsent(server)) < 1 << 20
        await running.until(lambda: running.gateway.admission.inflight == 0)
        await running.until(worker.calls[1].writer.is_closing)
        await gone(running)
        async with plain(running, tls=trusted) as session:
            running.server.request_drain()
            assert (await session.read())["error"]["code"] == "draining"
            assert await session.close_code() == 1001
        async with asyncio.timeout(5):
            await running.task
        assert running.server.exit_code == 0


def side(running: Running, session: Plain) -> WebSocketProtocol:
    """The gateway's side of it."""
    address = session.socket.transport.get_extra_info("sockname")
    (found,) = [
        connection
        for connection in running.server.server_state.connections
        if isinstance(connection, WebSocketProtocol) and connection.client == address
    ]
    return found


def unsent(server: WebSocketProtocol) -> tuple[int, int]:
    """In the transport of TLS, and in the one under it."""
    assert server.socket_transport is not None
    return server.transport.get_write_buffer_size(), server.socket_transport.get_write_buffer_size()


async def test_a_cut_knows_what_waits_behind_tls(workers: Any, tmp_path: Path) -> None:
    (worker,) = await workers("pod-0")
    pair = make_pair(tmp_path / "tls")
    trusted = trust_only(pair.certificate)
    worker.will(endless)
    limits: dict[str, Any] = {"max_realtime_conversation_bytes": 1 << 30}
    limits |= {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    async with run_gateway(worker, **limits) as running:
        async with stuck(running, trusted) as (session, connection):
            await session.ask()
            await session.until("response.output_text.delta")
            session.socket.transport.pause_reading()
            server = side(running, session)
            await until(lambda: unsent(server)[1] > 0 and connection.paused, 20)
            assert server.cut()
        await running.until(lambda: not server.connections & {server})
        assert not server.cut()  # it is gone


# Many, and elsewhere


async def test_two_hundred_sessions_at_once(workers: Any) -> None:
    both = await workers("pod-0", "pod-1")
    async with run_gateway(*both, drain_timeout_seconds=5) as running:
        url = f"ws://127.0.0.1:{running.port}{PATH}"
        all_open = asyncio.Barrier(200)

        async def talk(number: int) -> None:
            async with connect(url, proxy=None, ping_interval=None, open_timeout=30) as socket:
                await all_open.wait()
                for _ in range(2):
                    await socket.send(json.dumps({"type": "conversation.item.create", "item": SAID}))
                    await socket.send(
                        json.dumps({"type": "response.create", "response": {"metadata": {"n": f"{number}"}}})
                    )
                    while (found := json.loads(await socket.recv()))["type"] != "response.done":
                        pass
                    assert (found["response"]["status"], found["response"]["metadata"]) == (
                        "completed",
                        {"n": f"{number}"},
                    )

        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(talk(number))
        await gone(running)
        assert sum(len(worker.calls) for worker in both) == 400


async def test_any_asgi_server_will_do() -> None:
    """The application alone, in Starlette's test client."""
    async with FakeWorker() as worker:
        settings = GatewaySettings(workers=worker.address, drain_timeout_seconds=1)  # type: ignore[arg-type]

        def talk() -> list[str]:
            seen = []
            with TestClient(create_app(settings)) as client:
                with client.websocket_connect(PATH) as session:
                    session.send_json({"type": "conversation.item.create", "item": SAID})
                    session.send_json({"type": "response.create"})
                    while not seen or seen[-1] != "response.done":
                        seen.append(session.receive_json()["type"])
                with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/v1/realtime"):
                    pass
                assert refused.value.status_code == 400
                with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/v1/elsewhere"):
                    pass
                assert refused.value.json()["error"]["code"] == "not_found"
            return seen

        seen = await asyncio.to_thread(talk)
        assert seen[0] == "session.created"
        assert seen.count("response.output_text.delta") == 2
