"""Clients that never stop asking: each streams one answer after the other, and notes when its tokens came.

A client whose answer ends too soon asks for it again, as people's programs do; what it had before counts no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import msgspec

from app.cli.bench.recovery.figures import Asked
from app.cli.bench.streaming import prompt_of
from app.cli.bench.together import together

CLIENTS: Final = 4
PROMPT_TOKENS: Final = 16
ANSWER_TOKENS: Final = 16
"""Few, so that some client waits for a first token at any time."""
AGAIN_SECONDS: Final = 0.1
"""More often would take the restart's own share of the processor."""
REQUEST_SECONDS: Final = 180.0


def body_of(model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A streamed completion of exactly so many tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }


class Clients:
    """So many at a time, while :meth:`running`."""

    def __init__(self, url: str, model: str, *, headers: Mapping[str, str], count: int = CLIENTS) -> None:
        self._url, self._model, self._headers, self._count = url, model, headers, count
        self._more = asyncio.Event()
        self.asked: list[Asked] = []
        self.problems: set[str] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Clients]:
        limits = httpx.Limits(max_connections=self._count, max_keepalive_connections=self._count)
        async with (
            httpx.AsyncClient(
                timeout=REQUEST_SECONDS, limits=limits, headers=dict(self._headers), trust_env=False
            ) as client,
            together() as group,
        ):
            tasks = [group.create_task(self._ask_on(client, number)) for number in range(self._count)]
            yield self
            for task in tasks:
                task.cancel()

    async def first_token_after(self, moment: float, *, timeout_seconds: float) -> float:
        """When the first token came after ``moment``.

        Raises:
            TimeoutError: not in time.
        """
        async with asyncio.timeout(timeout_seconds):
            while True:
                # One of a client's last two answers has it, and moments of one answer only grow.
                later = [at for one in self.asked[-2 * self._count :] for at in one.tokens if at > moment]
                if later:
                    return min(later)
                self._more.clear()
                await self._more.wait()

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while True:
            asked = Asked(sent=time.monotonic(), tokens=[])
            self.asked.append(asked)
            body = body_of(self._model, prompt_of(number * 1_000_003 + turn, PROMPT_TOKENS), ANSWER_TOKENS)
            while problem := await self._one(client, body, asked):
                asked.problems += 1
                self.problems.add(problem)
                await asyncio.sleep(AGAIN_SECONDS)
            turn += 1

    async def _one(self, client: httpx.AsyncClient, body: dict[str, Any], asked: Asked) -> str:
        """Ask; why it was no whole answer, or empty."""
        try:
            async with client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    return f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return await self._read(response, asked)
        except httpx.HTTPError as error:
            return f"0: {type(error).__name__}: {error}"

    async def _read(self, response: httpx.Response, asked: Asked) -> str:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return ""
            if line.startswith("data: "):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    return f"200: {str(event['error'])[:200]}"
                if event.get("choices"):
                    asked.tokens.append(time.monotonic())
                    self._more.set()
        return "200: it ended without its end"
