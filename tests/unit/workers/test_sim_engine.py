"""SimEngine and its application, spoken to as ASGI; without a memory service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from workers import metrics
from workers.contract import HEADER_REQUEST_ID, HEADER_RESELECT
from workers.engine import Engine, EngineConfigError, EngineDeadError
from workers.engines.sim import SimEngine, SimFault
from workers.engines.sim.tokens import encode, expected_text, render_chat
from workers.settings import EngineSettings, SimSettings


def settings(**sim: Any) -> EngineSettings:
    pace = {"ttft_seconds": 0.0, "token_seconds": 0.0, "weights_bytes": 65536, "kv_bytes": 65536}
    return EngineSettings(engine="sim", gms=False, capacity=8, sim=SimSettings(**{**pace, **sim}))


@contextlib.asynccontextmanager
async def engine(tmp_path: Path, **sim: Any) -> AsyncIterator[SimEngine]:
    made = SimEngine(settings(**sim), None, tmp_path)
    try:
        await made.initialize()
        await made.wake(epoch=1)
        async with asyncio.timeout(10):
            yield made
    finally:
        await made.shutdown()


class Client:
    """One request to an ASGI application; ``leave`` is the client's disconnect."""

    def __init__(
        self, made: SimEngine, path: str, body: Any = None, *, method: str = "POST", request_id: str = ""
    ) -> None:
        headers = [(HEADER_REQUEST_ID.encode(), request_id.encode())] if request_id else []
        self._scope = {"type": "http", "method": method, "path": path, "headers": headers}
        self._body: bytes | None = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self._gone = asyncio.Event()
        self._app = made.app()
        self.first = asyncio.Event()
        self.sent: list[Any] = []

    async def __call__(self) -> Client:
        await self._app(self._scope, self._receive, self._send)
        return self

    def leave(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def raw(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.sent)

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def events(self) -> list[Any]:
        *events, done, nothing = self.raw.split(b"\n\n")
        assert (done, nothing) == (b"data: [DONE]", b"")
        return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Any) -> None:
        self.sent.append(event)
        self.first.set()


async def until_busy(made: SimEngine) -> None:
    """The loop's turns until a request is in the batch."""
    while not made.busy:  # noqa: ASYNC110 - an engine tells nobody that it got work
        await asyncio.sleep(0)


def expected(prompt: str, count: int) -> str:
    return expected_text(prompt, count, weights_bytes=65536)


def test_it_is_an_engine(tmp_path: Path) -> None:
    made: Engine = SimEngine(settings(), None, tmp_path)
    assert made.models == ("sim",)


async def test_completion(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        answer = await Client(made, "/v1/completions", {"prompt": "hello there", "max_tokens": 9}, request_id="r")()
        assert (answer.status, answer.json["id"]) == (200, "cmpl-r")
        (choice,) = answer.json["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected("hello there", 9), "length")
        prompt_tokens = len(encode("hello there"))
        assert answer.json["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 9,
            "total_tokens": prompt_tokens + 9,
        }
        assert int(answer.headers[b"content-length"]) == len(answer.raw)


async def test_chat_stream(tmp_path: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with engine(tmp_path) as made:
        answer = await Client(made, "/v1/chat/completions", body, request_id="r")()
        *chunks, usage = answer.events
        assert answer.headers[b"content-type"].startswith(b"text/event-stream")
        assert {chunk["id"] for chunk in answer.events} == {"chatcmpl-r"}
        assert len({chunk["created"] for chunk in answer.events}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len(chunks) == 1 + 64
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == expected(render_chat([("user", "hello")]), 64)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 64 + ["length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 64


async def test_streams_and_answers_say_the_same(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        body = {"prompt": "tell me", "max_tokens": 30}
        whole = await Client(made, "/v1/completions", body)()
        streamed = await Client(made, "/v1/completions", {**body, "stream": True})()
        assert "".join(event["choices"][0]["text"] for event in streamed.events) == whole.json["choices"][0]["text"]


async def test_a_run_again_with_the_same_request_id_differs_in_nothing_but_the_time(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        body = {"prompt": "tell me", "stream": True}
        first, second = [await Client(made, "/v1/completions", body, request_id="same")() for _ in range(2)]
        for one, other in zip(first.events, second.events, strict=True):
            assert {**one, "created": 0} == {**other, "created": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string(tmp_path: Path, stream: bool) -> None:
    words = expected("tell me", 20).split(" ")
    stop = f" {words[10]} {words[11]}"
    async with engine(tmp_path) as made:
        body = {"prompt": "tell me", "max_tokens": 20, "stop": [stop, "never"], "stream": stream}
        body["stream_options"] = {"include_usage": True}
        answer = await Client(made, "/v1/completions", body)()
        if stream:
            *chunks, usage = answer.events
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            finish = chunks[-1]["choices"][0]["finish_reason"]
        else:
            text, finish, usage = (
                answer.json["choices"][0]["text"],
                answer.json["choices"][0]["finish_reason"],
                answer.json,
            )
        assert (text, finish) == (" ".join(words[:10]), "stop")
        assert usage["usage"]["completion_tokens"] == 12
        assert not made.busy


async def test_text_held_back_for_a_stop_string_is_not_lost(tmp_path: Path) -> None:
    text = expected("tell me", 5)
    async with engine(tmp_path) as made:
        body = {"prompt": "tell me", "max_tokens": 5, "stop": text[-4:] + "!!!", "stream": True}
        answer = await Client(made, "/v1/completions", body)()
        assert "".join(event["choices"][0]["text"] for event in answer.events) == text


async def test_more_requests_than_slots(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        prompts = [f"prompt number {index}" for index in range(30)]
        clients = [Client(made, "/v1/completions", {"prompt": prompt, "max_tokens": 40}) for prompt in prompts]
        answers = await asyncio.gather(*(client() for client in clients))
        assert [answer.json["choices"][0]["text"] for answer in answers] == [expected(prompt, 40) for prompt in prompts]
        assert made.kv_usage() == 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_stops_the_generation(tmp_path: Path, stream: bool) -> None:
    async with engine(tmp_path, ttft_seconds=0.0 if stream else 60.0) as made:
        client = Client(made, "/v1/completions", {"prompt": "x", "max_tokens": 100_000, "stream": stream})
        task = asyncio.create_task(client())
        if stream:
            await client.first.wait()
        else:
            await until_busy(made)
        client.leave()
        await task
        assert not made.busy
        assert made.kv_usage() == 0.0
        assert b"[DONE]" not in client.raw


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_handler_stops_the_generation(tmp_path: Path, stream: bool) -> None:
    async with engine(tmp_path, ttft_seconds=60.0) as made:
        task = asyncio.create_task(Client(made, "/v1/completions", {"prompt": "x", "stream": stream})())
        await until_busy(made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not made.busy


async def test_a_disconnect_before_the_body_is_no_error(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        client = Client(made, "/v1/completions", {"prompt": "x"})
        client._body = None
        client.leave()
        assert (await client()).sent == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_errors_of_routing(tmp_path: Path, method: str, path: str, status: int, code: str) -> None:
    async with engine(tmp_path) as made:
        answer = await Client(made, path, {}, method=method)()
        assert (answer.status, answer.json["error"]["code"]) == (status, code)


async def test_a_refused_request_is_in_the_envelope(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        answer = await Client(made, "/v1/completions", {"prompt": "x", "n": 2})()
        assert (answer.status, answer.json["error"]["param"]) == (400, "n")
        answer = await Client(made, "/v1/completions", b"{")()
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")


async def test_models_and_tokenize(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        assert (await Client(made, "/health", method="GET")()).status == 200
        models = await Client(made, "/v1/models", method="GET")()
        assert [model["id"] for model in models.json["data"]] == ["sim"]
        assert (await Client(made, "/tokenize", {"prompt": "the"})()).json["count"] == 1


async def test_life_of_the_memory(tmp_path: Path) -> None:
    made = SimEngine(settings(), None, tmp_path)
    with pytest.raises(EngineDeadError):
        await made.check_health()
    await made.initialize()
    assert not made.memory().kv_mapped
    assert made.memory().weights_role == "private"
    assert made.memory().weights_bytes == made.memory().weights_outside_gms_bytes == 65536
    for epoch in (1, 2):
        await made.wake(epoch=epoch)
        assert made.memory().kv_mapped
        await made.check_health()
        await made.park()
        assert not made.memory().kv_mapped
    await made.shutdown()
    await made.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await made.check_health()


async def test_a_wake_at_the_wrong_time_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    fresh = SimEngine(EngineSettings(engine="sim", run_dir=tmp_path), None, tmp_path)
    with pytest.raises(RuntimeError, match="not initialized"):
        await fresh.wake(epoch=1)
    async with engine(tmp_path) as made:
        with pytest.raises(RuntimeError, match="awake already"):
            await made.wake(epoch=2)
        assert made.memory().kv_mapped
        await made.park()
        await made.park()
        assert not made.memory().kv_mapped
        await made.wake(epoch=3)
        assert made.memory().kv_mapped


async def test_park_keeps_requests_and_wake_goes_on_with_them(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        client = Client(made, "/v1/completions", {"prompt": "x", "max_tokens": 3000, "stream": True})
        task = asyncio.create_task(client())
        await client.first.wait()
        await made.park()
        steps = made.steps
        assert not made.busy
        assert not task.done()
        await made.wake(epoch=2)
        await task
        assert made.steps > steps
        assert "".join(event["choices"][0]["text"] for event in client.events) == expected("x", 3000)


async def test_quiesce_keeps_requests_and_wake_computes_them_anew(tmp_path: Path) -> None:
    """Twice, and with one that leaves meanwhile and one that comes: all end as if nothing had been."""
    async with engine(tmp_path) as made:
        body = {"max_tokens": 3000, "stream": True}
        clients = [Client(made, "/v1/completions", {**body, "prompt": prompt}) for prompt in ("x", "y", "z")]
        tasks = [asyncio.create_task(client()) for client in clients]
        for client in clients:
            await client.first.wait()
        for epoch in (2, 3):
            await made.quiesce(timeout_seconds=5)
            steps, sent = made.steps, len(clients[1].sent)
            assert not made.memory().kv_mapped
            assert made.kv_usage() == 0
            if epoch == 2:
                clients[2].leave()
                late = Client(made, "/v1/completions", {**body, "prompt": "late"})
                tasks.append(asyncio.create_task(late()))
                clients.append(late)
            await asyncio.sleep(0)
            assert (made.steps, made.busy) == (steps, False)
            await made.wake(epoch=epoch)
            await made.check_health()
            while len(clients[1].sent) <= sent:  # noqa: ASYNC110 - its answers come as they are made
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        for client, prompt in ((clients[0], "x"), (clients[1], "y"), (clients[3], "late")):
            assert "".join(event["choices"][0]["text"] for event in client.events) == expected(prompt, 3000)


async def test_kv_pages_too_small_for_the_capacity_are_refused(tmp_path: Path) -> None:
    made = SimEngine(settings().model_copy(update={"capacity": 4096}), None, tmp_path)
    with pytest.raises(EngineConfigError, match="kv_bytes"):
        await made.initialize()
    await made.shutdown()


async def test_startup_takes_as_long_as_asked(tmp_path: Path) -> None:
    made = SimEngine(settings(startup_seconds=0.05), None, tmp_path)
    began = asyncio.get_running_loop().time()
    await made.initialize()
    assert asyncio.get_running_loop().time() - began >= 0.049
    await made.shutdown()


@pytest.mark.parametrize(("lives", "restart", "least"), [(1, 60, 0), (2, 0.05, 0.049), (2, 0, 0)])
async def test_a_later_life_takes_as_long_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int, restart: float, least: float
) -> None:
    monkeypatch.setattr(metrics, "lives", lambda: lives)
    made = SimEngine(settings(startup_seconds=60 if lives > 1 else 0, restart_seconds=restart), None, tmp_path)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(30):
        await made.initialize()
    assert asyncio.get_running_loop().time() - began >= least
    await made.shutdown()


async def test_shutdown_cuts_streams_and_leaves_no_end_marker(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        client = Client(made, "/v1/completions", {"prompt": "x", "max_tokens": 100_000, "stream": True})
        task = asyncio.create_task(client())
        await client.first.wait()
        await made.shutdown()
        await task
        assert client.status == 200
        assert b"[DONE]" not in client.raw
        assert client.sent[-1]["more_body"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_says_so_while_nothing_was_delivered(tmp_path: Path, stream: bool) -> None:
    async with engine(tmp_path, ttft_seconds=60.0) as made:
        client = Client(made, "/v1/completions", {"prompt": "x", "stream": stream})
        task = asyncio.create_task(client())
        await until_busy(made)
        made.inject(SimFault.DEAD)
        await task
        assert (client.status, client.json["error"]["code"]) == (503, "engine_dead")
        assert client.headers[HEADER_RESELECT.encode()] == b"1"
        with pytest.raises(EngineDeadError, match="injected"):
            await made.check_health()


async def test_a_stalled_engine_is_healthy_and_busy_and_takes_no_step(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        made.inject(SimFault.STALL_STEPS)
        client = Client(made, "/v1/completions", {"prompt": "x"})
        task = asyncio.create_task(client())
        await until_busy(made)
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.steps == 0
        await made.check_health()
        client.leave()
        await task


async def test_lifespan_and_websockets(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> Any:
            return next(events)

        await made.app()({"type": "lifespan"}, receive, send)
        await made.app()({"type": "websocket", "path": "/"}, receive, send)
        assert [event["type"] for event in sent] == [
            "lifespan.startup.complete",
            "lifespan.shutdown.complete",
            "websocket.close",
        ]
