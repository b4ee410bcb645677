"""The ``openai`` package against the gateway."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import (
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    DefaultAsyncHttpxClient,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)

from tests.integration.app.conftest import Running, one_shell, run_gateway
from tests.integration.app.fake_worker import MODEL, answers, cuts, event, streams

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client(running: Running, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{running.base_url}/v1", **({"api_key": "k", "max_retries": 0} | options)) as made:
        yield made


async def test_chat(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, client(running) as openai:
        whole = await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert whole.choices[0].message.content == "from pod-0"
        stream = await openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert [piece.choices[0].delta.content async for piece in stream] == ["from pod-0", " done"]
        assert [model.id async for model in openai.models.list()] == [MODEL]


async def test_a_lost_worker_raises(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams(event("a"), end=b""))
    async with run_gateway(worker) as running, client(running) as openai:
        stream = await openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = []

        async def read() -> None:
            async for piece in stream:
                seen.append(piece.choices[0].delta.content)

        with pytest.raises(APIError, match="worker was lost"):
            await read()
        assert seen == ["a"]


async def test_errors_have_their_class(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, max_inflight=1) as running, client(running) as openai:
        with pytest.raises(NotFoundError) as missing:
            await openai.chat.completions.create(model="nobody", messages=MESSAGES)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        token = running.gateway.admission.admit()
        with pytest.raises(RateLimitError):
            await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        token.release()
        worker.will(answers(500, {"detail": "no envelope"}))
        with pytest.raises(InternalServerError):
            await openai.chat.completions.create(model=MODEL, messages=MESSAGES)


async def test_a_wrong_key_is_said_to_be(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, api_keys="right") as running:
        async with client(running, api_key="wrong") as openai:
            with pytest.raises(AuthenticationError):
                await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
            with pytest.raises(AuthenticationError):
                await openai.models.list()
        async with client(running, api_key="right") as openai:
            assert [model.id async for model in openai.models.list()] == [MODEL]
            assert (await openai.chat.completions.create(model=MODEL, messages=MESSAGES)).choices
    assert len(worker.calls) == 1


async def test_no_worker_is_a_server_error(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, wait_for_worker_seconds=0.05) as running, client(running) as openai:
        await worker.die()
        with pytest.raises(APIStatusError) as nobody:
            await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert isinstance(nobody.value, InternalServerError)
        assert (nobody.value.status_code, nobody.value.code) == (503, "no_worker")


@one_shell
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_comes_back_when_it_was_told_to(workers: Any, stream: bool) -> None:
    """The package waits as long as ``retry-after-ms`` says, or ``retry-after``, and then succeeds unseen."""
    (worker,) = await workers("pod-0")
    asked: list[float] = []
    told: list[float] = []
    async with run_gateway(worker, max_inflight=1) as running:
        token = running.gateway.admission.admit()

        async def on_request(_: httpx.Request) -> None:
            asked.append(time.monotonic())

        async def on_response(answer: httpx.Response) -> None:
            if answer.status_code == 429:
                told.append(float(answer.headers["retry-after-ms"]) / 1000)
                token.release()

        http = DefaultAsyncHttpxClient(
            event_hooks={"request": [on_request], "response": [on_response]}, trust_env=False
        )
        async with client(running, max_retries=1, http_client=http) as openai:
            answer: Any = await openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
            if stream:
                assert [piece.choices[0].delta.content async for piece in answer] == ["from pod-0", " done"]
            else:
                assert answer.choices[0].message.content == "from pod-0"
    assert (len(asked), len(told)) == (2, 1)
    assert asked[1] - asked[0] >= told[0]


async def test_a_break_is_not_even_a_retry_for_the_client(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(cuts(reset=True))
    async with run_gateway(one, two) as running, client(running) as openai:
        whole = await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert whole.choices[0].message.content == "from pod-1"
