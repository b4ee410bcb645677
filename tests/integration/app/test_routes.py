"""Which requests reach a worker, as what, and which never do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.openai.surface import RELAY_ROUTES
from tests.integration.app.conftest import Running, read_response, run_gateway
from tests.integration.app.fake_worker import MODEL, Call, answers, head, sends_and_cuts, streams

pytestmark = pytest.mark.integration

FORM_TYPE = {"content-type": "multipart/form-data; boundary=B"}
JSON_ROUTES = [path for path in RELAY_ROUTES if "/audio/" not in path]


def form(model: str, *, stream: bool = False, file: bytes = b"RIFF\x00\xff--B\r\n") -> bytes:
    part = '--B\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    fields = {"stream": "true" if stream else "false", "model": model}
    pieces = [part.format("file", '; filename="a.wav"').encode() + file + b"\r\n"]
    pieces += [part.format(name, "").encode() + value.encode() + b"\r\n" for name, value in fields.items()]
    return b"".join(pieces) + b"--B--\r\n"


async def test_requests_travel_byte_for_byte(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    body = b'{ "model":"tiny" , "n":1e400, "big":123456789012345678901234567890, "unknown":{"\\u00e9":[1.10]} }'
    async with run_gateway(worker) as running:
        for path in JSON_ROUTES:
            answer = await running.client.post(f"{path}?a=%2F&b=1&&c", content=body)
            assert answer.status_code == 200, answer.text
            assert (worker.calls[-1].target, worker.calls[-1].body) == (f"{path}?a=%2F&b=1&&c", body)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_a_form_travels_byte_for_byte_to_its_model(path: str, workers: Any) -> None:
    (one,) = await workers("pod-0", models=("whisper",))
    (other,) = await workers("pod-1", models=("tiny",))
    one.default = other.default = answers(document={"text": "said"})
    body = form("whisper")
    async with run_gateway(one, other) as running:
        for _ in range(2):
            answer = await running.client.post(path, content=body, headers=FORM_TYPE)
            assert answer.json() == {"text": "said"}
        assert [call.body for call in one.calls] == [body, body]
        assert one.calls[0].headers["content-type"] == FORM_TYPE["content-type"]
        assert other.calls == []
        missing = await running.client.post(path, content=form("nobody"), headers=FORM_TYPE)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        wrong = await running.client.post(path, json={"model": "whisper"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("path", "content_type", "said"),
    [
        ("/v1/audio/transcriptions", "text/plain; charset=utf-8", b"said"),
        ("/v1/audio/transcriptions", "text/vtt", b"WEBVTT"),
        ("/v1/audio/translations", "text/plain", b""),
        ("/v1/embeddings", "application/octet-stream", b"\x00\x01"),
        ("/pooling", "application/octet-stream", b"\x00\x01"),
    ],
)
async def test_answers_that_are_no_json(path: str, content_type: str, said: bytes, workers: Any) -> None:
    """Where a route has them."""
    (worker,) = await workers("pod-0")
    worker.will(sends_and_cuts(head(200, content_type=content_type, content_length=len(said)) + said))
    async with run_gateway(worker) as running:
        body = form(MODEL) if "audio" in path else b'{"model":"tiny"}'
        answer = await running.client.post(path, content=body, headers=FORM_TYPE if "audio" in path else {})
        assert (answer.status_code, answer.content) == (200, said)
        assert answer.headers["content-type"] == content_type
        assert len(worker.calls) == 1


async def test_a_streamed_transcription_that_is_cut_says_so(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    piece = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n'
    body = form(MODEL, stream=True)
    async with run_gateway(worker) as running:
        worker.will(streams(piece))
        whole = await running.client.post("/v1/audio/transcriptions", content=body, headers=FORM_TYPE)
        assert whole.content == piece + b"data: [DONE]\n\n"
        worker.will(streams(piece, end=b""))
        cut = await running.client.post("/v1/audio/transcriptions", content=body, headers=FORM_TYPE)
        assert cut.content.startswith(piece)
        assert b'"worker_lost"' in cut.content


async def test_errors_in_a_stream_have_the_form_of_the_route(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    begin = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    async with run_gateway(worker) as running:
        worker.will(streams(begin, end=b""))
        body = {"model": MODEL, "messages": [], "stream": True}
        answer = await running.client.post("/v1/messages", json=body)
        event = answer.text.removeprefix(begin.decode()).splitlines()
        assert event[0] == "event: error"
        said = json.loads(event[1].removeprefix("data: "))
        assert (said["type"], said["error"]["code"]) == ("error", "worker_lost")


async def test_a_request_without_a_model(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    async with run_gateway(one, two) as running:
        assert (await running.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        two.say(models=("other", "another"))
        await running.until(lambda: running.gateway.registry.mixed)
        answer = await running.client.post("/tokenize", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_required")
        assert answer.json()["error"]["message"].endswith("set model to one of 'another', 'other', 'tiny'.")
        assert (await running.client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 200
        one.say(models=("other", "another"))
        await running.until(lambda: not running.gateway.registry.mixed)
        assert (await running.client.post("/tokenize", json={"prompt": "x"})).status_code == 200


STATEFUL: Any = (
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": "r"}, "previous_response_id"),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "background": True}, "background"),
    ("POST", "/v1/responses", {"model": MODEL, "input": "x", "conversation": "c"}, "conversation"),
    ("GET", "/v1/responses/resp_1", None, None),
    ("GET", "/v1/responses/resp_1?stream=true", None, None),
    ("DELETE", "/v1/responses/resp_1", None, None),
    ("POST", "/v1/responses/resp_1/cancel", {}, None),
    ("GET", "/v1/responses/resp_1/input_items", None, None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, None),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}, None),
)


async def test_state_is_refused(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for method, path, body, param in STATEFUL:
            answer = await running.client.request(method, path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_stateful", param), path
        assert worker.calls == []


async def test_what_is_not_offered(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for path in ("/v1/files", "/v1/batches/b/cancel", "/v1/assistants", "/v1/threads"):
            answer = await running.client.post(path, json={"model": MODEL})
            assert answer.status_code == 404
            assert "inference only" in answer.json()["error"]["message"]
        assert worker.calls == []


ADMIN = (
    "/internal/watch",
    "/internal/anything",
    "/health/../internal/watch",
    "/abort_requests",
    "/collective_rpc",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_sleeping",
    "/load",
    "/pause",
    "/ping",
    "/release_kv_cache_memory",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/sleep",
    "/start_profile",
    "/tokenizer_info",
    "/update_weights",
    "/v1/chat/completions/render",
    "/version",
    "/wake_up",
)


def disguises(path: str) -> list[str]:
    """The same path as a sloppy server might understand it."""
    return [
        path,
        path.upper(),
        path + "/",
        "/" + path,
        "/." + path,
        "/v1/.." + path,
        "/v1/chat/completions/../../.." + path,
        "/v1/chat/completions/..%2f..%2f..%2f" + path[1:],
        "/v1/chat/completions;" + path,
        "/v1/chat/completions\\..\\..\\.." + path.replace("/", "\\"),
        "/v1/models/../.." + path,
        "/v1/models/..%2F.." + path.replace("/", "%2F"),
        "/%2e" + path,
        "/%2e%2e" + path,
        path.replace("/", "/%2F", 1),
        "".join(f"%{byte:02x}" if byte != 0x2F else "/" for byte in path.encode()),
        path.replace(path[1], f"%25{ord(path[1]):02x}", 1),
        path + "%00",
        path + "?x=/v1/chat/completions",
        path + "#/v1/chat/completions",
        "http://g" + path,
        "http://worker" + path,
    ]


async def test_admin_routes_of_workers_are_out_of_reach(workers: Any) -> None:
    """Each in every disguise, over one connection while it lives: no worker is asked, and nothing is redirected."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        for path in ADMIN:
            for disguised in disguises(path):
                for method in ("GET", "POST"):
                    status = await ask(running, method, disguised)
                    assert status in (400, 404, 405), (method, disguised, status)
        assert worker.calls == []


async def ask(running: Running, method: str, target: str) -> int:
    """The target exactly as it is written."""
    reader, writer = await running.raw(
        f"{method} {target} HTTP/1.1\r\nhost: g\r\ncontent-length: 16\r\nconnection: close\r\n\r\n"
        '{"model":"tiny"}'.encode()
    )
    try:
        return (await read_response(reader))[0]
    finally:
        writer.close()
        await writer.wait_closed()


async def test_only_the_exact_path_is_relayed(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        assert await ask(running, "POST", "/v1/chat/completions?q=1") == 200
        assert worker.calls[0].target == "/v1/chat/completions?q=1"
        for target in ("/v1/chat/completions/", "/V1/chat/completions", "/v1//chat/completions", "v1/chat/completions"):
            assert await ask(running, "POST", target) in (400, 404)
        assert len(worker.calls) == 1


async def test_models(workers: Any) -> None:
    (one,) = await workers("pod-0", models=("tiny", "org/tiny-lora"))
    (two,) = await workers("pod-1", models=("tiny", "naïve model"))
    async with run_gateway(one, two) as running:
        answer = (await running.client.get("/v1/models")).json()
        assert answer["object"] == "list"
        assert [model["id"] for model in answer["data"]] == ["tiny", "org/tiny-lora", "naïve model"]
        for path, name in (
            ("org/tiny-lora", "org/tiny-lora"),
            ("org%2Ftiny-lora", "org/tiny-lora"),
            ("na%C3%AFve%20model", "naïve model"),
        ):
            found = (await running.client.get(f"/v1/models/{path}")).json()
            assert (found["id"], found["object"]) == (name, "model")
        for path in ("nobody", "tiny/", "%FF", "org%252Ftiny-lora"):
            missing = await running.client.get(f"/v1/models/{path}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found"), path
        await two.die()
        await running.until(lambda: running.state(two).value == "DOWN")
        assert [m["id"] for m in (await running.client.get("/v1/models")).json()["data"]] == ["tiny", "org/tiny-lora"]


async def test_each_model_has_its_workers(workers: Any) -> None:
    (one,) = await workers("pod-0", models=("a",))
    (two,) = await workers("pod-1", models=("b",))

    async def say_who(call: Call) -> None:
        await answers(document={"who": call.worker.name})(call)

    one.default = two.default = say_who
    async with run_gateway(one, two) as running:
        for model, who in (("a", "pod-0"), ("b", "pod-1")) * 2:
            assert (await running.chat(model=model)).json() == {"who": who}
