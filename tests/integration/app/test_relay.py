"""Requests through a real gateway, over real sockets, to workers that behave and that do not."""

from __future__ import annotations

from typing import Any

from tests.integration.app.conftest import run_gateway


async def test_whole_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.chat()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "from pod-0"


async def test_stream(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        answer = await running.chat(stream=True)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
