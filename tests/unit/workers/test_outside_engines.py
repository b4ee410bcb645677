"""The adapters for engines of others, over stand-ins with their interface: what they refuse, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asgi import ask
from workers.asgi import Message, Receive, Scope, Send, respond_error
from workers.engine import ASGIApp, EngineConfigError, EngineDeadError
from workers.engines.envelope import in_envelope
from workers.engines.outside import OutsideEngine
from workers.engines.sglang.engine import SglangEngine
from workers.engines.trtllm.engine import TrtllmEngine
from workers.memory import MemoryService
from workers.resume import CODE_RESUME_UNSUPPORTED, RESUME_CONTENT_TYPE
from workers.settings import EngineSettings

STAND_INS = Path(__file__).parents[2] / "support" / "other_engines"
BOTH = pytest.mark.parametrize("cls", [SglangEngine, TrtllmEngine])
LONG = json.dumps({"model": "model", "prompt": "hello", "max_tokens": 2000, "stream": True}).encode()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importable as the real ones are, and gone afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("sglang", "tensorrt_llm", "generating"):
            del sys.modules[name]


def settings(folder: Path, name: str = "model", **more: Any) -> EngineSettings:
    return EngineSettings(engine="sglang", gms=False, model=folder / name, max_model_len=4096, **more)


async def made(cls: type[OutsideEngine], folder: Path, name: str = "model", **more: Any) -> OutsideEngine:
    engine = cls(settings(folder, name, **more), None, folder)
    try:
        await engine.initialize()
    except EngineConfigError:
        await engine.shutdown()
        raise
    return engine


def served(engine: OutsideEngine) -> ASGIApp:
    """Its application, with what a server adds to a scope."""
    app = engine.app()

    async def with_more(scope: Scope, receive: Receive, send: Send) -> None:
        await app(
            {"query_string": b"", "scheme": "http", "root_path": "", "http_version": "1.1", **scope}, receive, send
        )

    return with_more


def generating(engine: Any) -> Any:
    return getattr(engine._engine, "tokenizer_manager", engine._engine).generating


@BOTH
def test_a_memory_service_is_refused_by_name(cls: type[OutsideEngine], tmp_path: Path) -> None:
    service = MemoryService(socket="s", device="cpu:0", engine="a", instance="i", timeout_seconds=1)
    with pytest.raises(EngineConfigError, match=r"nothing of them can lie in the memory service.*--no-gms"):
        cls(settings(tmp_path), service, tmp_path)


@BOTH
def test_without_a_model_there_is_nothing_to_serve(cls: type[OutsideEngine], tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="has no embedded model: name one with --model"):
        cls(EngineSettings(gms=False), None, tmp_path)


@BOTH
async def test_an_engine_that_is_not_installed_is_said_to_be_missing(cls: type[OutsideEngine], tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"is not installed here: there is no package (sglang|tensorrt_llm)"):
        await made(cls, tmp_path)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("cls", "module", "missing"),
    [
        (SglangEngine, "sglang.srt.entrypoints.engine:Engine", "get_all_child_pids"),
        (TrtllmEngine, "tensorrt_llm.llmapi:AsyncLLM", "release"),
    ],
)
async def test_another_interface_is_refused_with_what_is_missing(
    cls: type[OutsideEngine], module: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, owner = module.partition(":")
    monkeypatch.delattr(getattr(__import__(name, fromlist=[owner]), owner), missing)
    with pytest.raises(EngineConfigError, match=f"has another interface than the adapter needs: .*'{missing}'"):
        await made(cls, tmp_path)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("cls", "arguments", "sentence"),
    [
        (SglangEngine, ("--no-such-thing=1",), "SGLang does not take these engine_args: unrecognized arguments"),
        (SglangEngine, ("--port=1",), "must not hold --port"),
        (TrtllmEngine, ("--no-such-thing=1",), "unknown arguments: no_such_thing"),
        (TrtllmEngine, ("max_seq_len=1",), "as --name=value"),
        (TrtllmEngine, ("--max-seq-len=1",), "must not hold max_seq_len"),
    ],
)
async def test_wrong_arguments_are_refused_in_a_sentence(
    cls: type[OutsideEngine], arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineConfigError, match=sentence):
        await made(cls, tmp_path, engine_args=arguments)


@pytest.mark.usefixtures("stand_ins")
@BOTH
async def test_the_kv_cache_goes_and_comes_by_its_name(cls: type[OutsideEngine], tmp_path: Path) -> None:
    engine = await made(cls, tmp_path, engine_args=("--tp-size=2",) if cls is SglangEngine else ())
    calls = generating(engine).calls
    await engine.wake(epoch=1)
    await engine.park()
    await engine.park()
    assert calls == ["release kv_cache", "resume kv_cache", "release kv_cache"]
    await engine.shutdown()
    await engine.shutdown()
    assert calls[3:] == ["shutdown"]


@pytest.mark.usefixtures("stand_ins")
@BOTH
async def test_a_shutdown_cancels_what_is_consumed_first(cls: type[OutsideEngine], tmp_path: Path) -> None:
    engine = await made(cls, tmp_path)
    await engine.wake(epoch=1)
    inner = generating(engine)
    headers = (b"content-type", b"application/json")
    request = asyncio.ensure_future(ask(served(engine), "/v1/completions", LONG, headers))
    while not inner.requests and not request.done():  # noqa: ASYNC110 - the stand-in tells nobody
        await asyncio.sleep(0.001)
    assert engine.busy
    await engine.shutdown()
    answer = await request
    assert not answer.ended  # the connection ends, and with it the gateway's attempt
    assert b"[DONE]" not in answer.body
    assert (engine.busy, inner.requests) == (False, set())


@pytest.mark.usefixtures("stand_ins")
async def test_a_process_of_sglang_that_dies_ends_the_engine(tmp_path: Path) -> None:
    engine = await made(SglangEngine, tmp_path)
    await engine.wake(epoch=1)
    await engine.check_health()
    calls, (child,) = generating(engine).calls, engine._engine.get_all_child_pids()
    os.kill(child, signal.SIGKILL)
    while not engine.problem(engine._engine):  # noqa: ASYNC110 - a zombie tells nobody
        await asyncio.sleep(0.001)
    with pytest.raises(EngineDeadError, match=f"SGLang: its process {child} has ended"):
        await engine.check_health()
    with pytest.raises(EngineDeadError, match="has ended"):
        await engine.check_health()
    assert engine.dead
    assert "shutdown" not in calls  # the lock must be free at once
    await engine.shutdown()


@pytest.mark.usefixtures("stand_ins")
async def test_an_executor_that_is_not_well_ends_the_engine(tmp_path: Path) -> None:
    engine = await made(TrtllmEngine, tmp_path)
    generating(engine).health = False
    with pytest.raises(EngineDeadError, match="executor says that it is not well"):
        await engine.check_health()
    assert engine.dead
    await engine.shutdown()


@pytest.mark.usefixtures("stand_ins")
async def test_an_end_whose_shutdown_fails_is_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = await made(TrtllmEngine, tmp_path, "breaks-at-its-end")
    with caplog.at_level(logging.WARNING):
        await engine.shutdown()
    assert [record.getMessage() for record in caplog.records] == ["TensorRT-LLM: its shutdown failed"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("how", ["answers 500", "raises"])
async def test_a_request_that_fails_has_the_engine_looked_at_first(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death is known before what its application makes of it can leave."""
    engine = await made(TrtllmEngine, tmp_path)
    generating(engine).health = False
    dead_at_the_answer: list[bool] = []

    async def failing(_scope: Scope, _receive: Receive, send: Send) -> None:
        if how == "raises":
            raise RuntimeError("the engine is gone")
        await respond_error(send, 500, message="the engine is gone", kind="server_error", code="x")

    async def send(message: Message) -> None:
        dead_at_the_answer.append(engine.dead)

    async def receive() -> Message:
        raise AssertionError

    monkeypatch.setattr(engine, "_app", failing)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with contextlib.suppress(RuntimeError):
        await engine.app()(scope, receive, send)
    assert engine.dead
    assert all(dead_at_the_answer)
    await engine.shutdown()


@pytest.mark.usefixtures("stand_ins")
@BOTH
async def test_a_resume_is_refused_with_its_code(cls: type[OutsideEngine], tmp_path: Path) -> None:
    engine = await made(cls, tmp_path)
    await engine.wake(epoch=1)
    answer = await ask(engine.app(), "/v1/completions", b"", (b"content-type", RESUME_CONTENT_TYPE.encode()))
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (409, CODE_RESUME_UNSUPPORTED)
    await engine.shutdown()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"object":"error","message":"too long","type":"BadRequestError","param":"n","code":400}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"]}]}', '[{"loc":["body"]}]'),
        (b'{"error":"no JSON"}', "no JSON"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "the engine answered 400"),
        (b"[]", "[]"),
    ],
)
def test_errors_get_the_envelope(body: bytes, message: str) -> None:
    error = json.loads(in_envelope(400, body))["error"]
    assert (error["message"], error["type"]) == (message, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}


def test_an_envelope_stays_as_it_is() -> None:
    body = b'{"error": {"message": "no", "type": "x", "param": null, "code": "y"}}'
    assert in_envelope(400, body) is body
