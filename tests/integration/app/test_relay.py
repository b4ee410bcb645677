"""Requests through a real gateway, over real sockets, to workers that behave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.integration.app.conftest import read_response, run_gateway
from tests.integration.app.fake_worker import (
    DONE,
    MODEL,
    answers,
    chunk,
    event,
    head,
    sends_and_cuts,
    streams,
    streams_then_waits,
    streams_units,
)
from workers.contract import Role


async def test_whole_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "from pod-0"
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.content)


async def test_stream_bytes_are_the_workers_bytes(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams(event("a"), event("b") + b": note\n\n" + event("c")))
    async with run_gateway(worker) as running:
        answer = await running.chat(stream=True)
        assert answer.status_code == 200
        assert answer.content == event("a") + event("b") + b": note\n\n" + event("c") + DONE
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"


async def test_events_cut_across_reads_leave_whole(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    whole = event("a") + event("b") + DONE
    worker.will(streams(*(whole[i : i + 1] for i in range(len(whole))), end=b""))
    async with run_gateway(worker) as running, running.stream() as answer:
        pieces = [piece async for piece in answer.aiter_raw()]
        assert b"".join(pieces) == whole
        assert all(piece.endswith(b"\n\n") for piece in pieces)


async def test_token_notes_do_not_reach_the_client(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_units([event("a")], [], [event("b"), event("c")]))
    async with run_gateway(worker) as running:
        answer = await running.chat(stream=True)
        assert answer.content == event("a") + event("b") + event("c") + DONE
        assert "x-hotspare-stream" not in answer.headers
        assert worker.calls[0].headers["x-hotspare-stream"] == "1"
        await running.chat()  # notes of a whole answer come before it
        assert worker.calls[1].headers["x-hotspare-stream"] == "1"
        await running.client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
        assert "x-hotspare-stream" not in worker.calls[2].headers


async def test_an_event_is_sent_when_it_comes(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("first")))
    async with run_gateway(worker) as running, running.stream() as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == event("first")
        (await worker.call()).go.set()
        assert b"".join([piece async for piece in pieces]) == DONE


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", DONE),
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ],
)
async def test_each_streaming_route_ends_its_way(workers: Any, path: str, end: bytes) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams(b"data: {}\n\n", end=end))
    async with run_gateway(worker) as running:
        answer = await running.client.post(path, json={"model": MODEL, "stream": True})
        assert answer.content == b"data: {}\n\n" + end


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/detokenize"])
async def test_other_routes_with_query_and_unknown_fields(workers: Any, path: str) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(document={"path": path}))
    async with run_gateway(worker) as running:
        body = b'{"model": "tiny",  "input": "hi", "unknown": [1, {"a": null}]}'
        answer = await running.client.post(f"{path}?a=1&b=%20x", content=body)
        assert answer.json() == {"path": path}
    call = worker.calls[0]
    assert (call.method, call.target, call.body) == ("POST", f"{path}?a=1&b=%20x", body)


async def test_round_robin(workers: Any) -> None:
    started = await workers("pod-0", "pod-1", "pod-2")
    async with run_gateway(*started) as running:
        for _ in range(6):
            assert (await running.chat()).status_code == 200
    assert [len(worker.calls) for worker in started] == [2, 2, 2]


async def test_routing_by_model(workers: Any) -> None:
    (one,) = await workers("pod-0")
    (two,) = await workers("pod-1", models=("other", MODEL))
    async with run_gateway(one, two) as running:
        for _ in range(3):
            assert (await running.chat(model="other")).status_code == 200
        assert (len(one.calls), len(two.calls)) == (0, 3)
        unknown = await running.chat(model="nobody's")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_connections_are_kept(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for stream in (False, True, False):
            await running.chat(stream=stream)
    assert len({id(call.writer) for call in worker.calls}) == 1


async def test_headers_up_and_down(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(x_hotspare_secret="1", x_kept="yes", x_request_id="worker-made", keep_alive="timeout=5"))
    async with run_gateway(worker) as running:
        answer = await running.client.post(
            "/v1/chat/completions",
            json={"model": MODEL},
            headers={
                "Authorization": "Bearer key",
                "X-Request-Id": "client-1",
                "X-Hotspare-Request-Id": "forged",
                "Accept-Encoding": "gzip, br",
                "Connection": "keep-alive, x-private",
                "X-Private": "1",
                "X-Kept": "1",
            },
        )
    sent = worker.calls[0].headers
    assert sent["x-request-id"] == "client-1"
    assert sent["x-hotspare-request-id"] not in ("forged", "client-1")
    assert sent["accept-encoding"] == "identity"
    assert sent["x-kept"] == "1"
    assert not {"authorization", "x-private", "connection"} & sent.keys()
    assert answer.headers["x-request-id"] == "client-1"
    assert answer.headers["x-kept"] == "yes"
    assert not {"x-hotspare-secret", "keep-alive"} & answer.headers.keys()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere", "/health"])
async def test_every_answer_has_a_request_id(workers: Any, path: str) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for given, kept in (("mine", True), ("not fit", False), (None, False)):
            headers = {} if given is None else {"x-request-id": given}
            method = "POST" if "chat" in path else "GET"
            body = {"json": {"model": MODEL}} if method == "POST" else {}
            answer = await running.client.request(method, path, headers=headers, **body)
            assert (answer.headers["x-request-id"] == given) is kept
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("status", "document", "expected_status", "code"),
    [
        (400, {"error": {"message": "m", "type": "t", "param": "p", "code": 400}}, 400, 400),
        (500, {"error": {"message": "m", "type": "t", "param": "p", "code": "boom"}}, 500, "boom"),
        (503, {"error": {"message": "m", "type": "t", "param": "p", "code": "busy"}}, 503, "busy"),
        (404, {"detail": "Not Found"}, 404, "task_not_served"),
        (422, {"detail": [{"loc": ["body"]}]}, 400, "bad_request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_error_passes_in_an_envelope(
    workers: Any, status: int, document: Any, expected_status: int, code: object, stream: bool
) -> None:
    (worker,) = await workers("pod-0")
    worker.will(answers(status, document))
    async with run_gateway(worker) as running:
        answer = await running.chat(stream=stream)
        assert answer.status_code == expected_status
        assert answer.json()["error"]["code"] == code
    assert len(worker.calls) == 1


async def test_an_answer_too_large_to_hold_passes_as_it_comes(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    document = {"data": "x" * 300_000}
    worker.will(answers(document=document), sends_and_cuts(head(200, content_length=9_000_000) + b"{" * 100_000))
    async with run_gateway(worker, max_held_bytes=65536) as running:
        assert (await running.chat()).json() == document
        with pytest.raises(httpx.RemoteProtocolError):  # a cut must not look like an end
            await running.chat()


async def test_interim_responses_are_not_answers(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(sends_and_cuts(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + head(200, content_length=2) + b"{}"))
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert (answer.status_code, answer.content) == (200, b"{}")
        assert "link" not in answer.headers


async def test_models(workers: Any) -> None:
    (one,) = await workers("pod-0", models=("a", "org/b"))
    (two,) = await workers("pod-1", models=("org/b", "c"))
    async with run_gateway(one, two) as running:
        listed = (await running.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [item["id"] for item in listed["data"]] == ["a", "org/b", "c"]
        one_model = await running.client.get("/v1/models/org/b")
        assert one_model.json()["id"] == "org/b"
        missing = await running.client.get("/v1/models/nobody")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        nameless = await running.client.get("/v1/models/")
        assert (nameless.status_code, nameless.json()["error"]["code"]) == (404, "not_found")
        assert "did you mean /v1/models?" in nameless.text
        two.say(models=("d",), state=Role.DRAINING)
        await running.until(lambda: "d" in running.gateway.registry.reachable_models())
        listed = (await running.client.get("/v1/models")).json()
        assert [item["id"] for item in listed["data"]] == ["a", "org/b", "d"]


async def test_how_long_a_request_may_be(workers: Any) -> None:
    """Any worker of a model may get it, so the least of what they say; one that says nothing does not count."""
    one, two, silent = await workers("pod-0", "pod-1", "pod-2", models=("a",))
    one.say(max_model_len=4096)
    two.say(max_model_len=2048, models=("a", "b"))
    silent.say(models=("a", "c"))
    async with run_gateway(one, two, silent) as running:
        await running.until(lambda: len(running.gateway.registry.candidates("a")) == 3)
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert {item["id"]: item.get("max_model_len") for item in listed} == {"a": 2048, "b": 2048, "c": None}
        assert (await running.client.get("/v1/models/a")).json()["max_model_len"] == 2048
        two.say(max_model_len=8192)
        await running.until(lambda: running.gateway.registry.reachable_models()["b"] == 8192)
        assert (await running.client.get("/v1/models/a")).json()["max_model_len"] == 4096


async def test_a_slow_client_pauses_the_worker_and_loses_nothing(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    big = [b"data: " + bytes([97 + i % 26]) * 100_000 + b"\n\n" for i in range(400)]
    sent: list[int] = []

    async def behave(call: Any) -> None:
        await call.send(head(200, content_type="text/event-stream", transfer_encoding="chunked"))
        for number, piece in enumerate((*big, DONE)):
            await call.send(chunk(piece))
            sent.append(number)
        await call.send(b"0\r\n\r\n")

    worker.will(behave)
    async with run_gateway(worker) as running:
        reader, writer = await running.raw_chat(stream=True)
        stalled = await still(lambda: len(sent))  # what socket buffers hold, not what the gateway does
        assert stalled < len(big)
        status, _, body = await read_response(reader)
        writer.close()
        assert status == 200
        whole = body == b"".join(big) + DONE
        assert whole  # compared beforehand: nobody wants to see the difference of 40 MB


async def still(value: Callable[[], int]) -> int:
    """Wait until a value has not changed for a while."""
    seen = -1
    while seen != (seen := value()):  # noqa: ASYNC110
        await asyncio.sleep(0.3)
    return seen


async def test_parallel_requests_do_not_mix(workers: Any) -> None:
    started = await workers("pod-0", "pod-1")

    async def echo(call: Any) -> None:
        await streams(*(event(call.json["tag"]) for _ in range(5)))(call)

    for worker in started:
        worker.default = echo
    async with run_gateway(*started) as running:
        results = await asyncio.gather(*(running.chat(stream=True, tag=str(i)) for i in range(60)))
    for number, answer in enumerate(results):
        assert answer.content == event(str(number)) * 5 + DONE
