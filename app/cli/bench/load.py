"""A steady stream of small requests, each with the moments it was sent and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import msgspec

from app.cli.bench.together import together

REQUEST_TIMEOUT_SECONDS: Final = 180.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request's fate. Times are ``time.monotonic()`` seconds; ``status`` 0 means that no answer came."""

    sent: float
    done: float
    status: int
    problem: str | None = None

    @property
    def failed(self) -> bool:
        return self.status != 200


class SteadyLoad:
    """Sends one request every ``period_seconds`` unless ``most_outstanding`` are unanswered, until closed."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any],
        *,
        headers: Mapping[str, str],
        period_seconds: float,
        most_outstanding: int,
    ) -> None:
        self._url, self._body, self._headers = url, body, headers
        self._period, self._most = period_seconds, most_outstanding
        self._running: set[asyncio.Task[None]] = set()
        self._more = asyncio.Event()
        self.answers: list[Answer] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SteadyLoad]:
        """Send while inside; requests that are out at the end are waited for."""
        limits = httpx.Limits(max_connections=self._most, max_keepalive_connections=self._most)
        async with (
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_SECONDS, limits=limits, trust_env=False) as client,
            together() as group,
        ):
            sending = group.create_task(self._send(client, group))
            yield self
            sending.cancel()

    async def wait_for_success(self, *, count: int, timeout_seconds: float) -> None:
        """Until ``count`` more requests succeeded.

        Raises:
            TimeoutError: not in time.
        """
        start = len(self.answers)
        async with asyncio.timeout(timeout_seconds):
            while sum(not answer.failed for answer in self.answers[start:]) < count:
                self._more.clear()
                await self._more.wait()

    async def wait_for_answer_after(self, moment: float, *, timeout_seconds: float) -> Answer:
        """The first success that came after ``moment``.

        Raises:
            TimeoutError: not in time.
        """
        async with asyncio.timeout(timeout_seconds):
            while True:
                later = [answer for answer in self.answers if not answer.failed and answer.done > moment]
                if later:
                    return min(later, key=lambda answer: answer.done)
                self._more.clear()
                await self._more.wait()

    async def _send(self, client: httpx.AsyncClient, group: asyncio.TaskGroup) -> None:
        due = time.monotonic()
        while True:
            if len(self._running) < self._most:
                task = group.create_task(self._one(client))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            due = max(due + self._period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _one(self, client: httpx.AsyncClient) -> None:
        sent = time.monotonic()
        status, problem = 0, None
        try:
            response = await client.post(self._url, json=self._body, headers=self._headers)
            status = response.status_code
            if status != 200:
                problem = response.text[:200]
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        self.answers.append(Answer(sent=sent, done=time.monotonic(), status=status, problem=problem))
        self._more.set()
