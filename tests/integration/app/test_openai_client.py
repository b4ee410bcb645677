"""The ``openai`` package against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, InternalServerError, NotFoundError, RateLimitError

from tests.integration.app.conftest import Running, run_gateway
from tests.integration.app.fake_worker import MODEL, answers, cuts, event, streams

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client(running: Running, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="k", **({"max_retries": 0} | options)) as made:
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


async def test_a_break_is_not_even_a_retry_for_the_client(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    one.will(cuts(reset=True))
    async with run_gateway(one, two) as running, client(running) as openai:
        whole = await openai.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert whole.choices[0].message.content == "from pod-1"
