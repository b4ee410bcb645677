"""The load: clients that ask one thing after the other, each in its own manner, and note what they see and when."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from app.cli.bench.chaos.answers import Fate, Got
from app.cli.bench.chaos.figures import Outcome, Pause
from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.system import BenchError
from workers.engines.sim.tokens import render_chat

REQUEST_SECONDS: Final = 120.0
"""An answer that takes longer is lost."""
SLOW_READ_BYTES: Final = 2048
SLOW_PAUSE_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 0.5
"""So long a client waits that was refused, or got no answer: less than it is told to, since a run is short."""


class Answers(Protocol):
    """What an engine says to a question: computed, or learned."""

    def body(self, question: Question) -> dict[str, Any]: ...

    def judge(self, question: Question, body: dict[str, Any], got: Got) -> tuple[Fate, str]: ...


class Texts(Protocol):
    """What an engine says after any prompt, where that can be computed. Sessions are compared with it."""

    def text(self, prompt: str, count: int) -> str: ...


class Listener:
    """Notes silences of one stream."""

    def __init__(self, shortest: float) -> None:
        """``shortest``: seconds from which on a silence is noted."""
        self._shortest = shortest
        self.pauses: list[Pause] = []
        self._last = time.monotonic()

    def heard(self) -> None:
        now = time.monotonic()
        if now - self._last >= self._shortest:
            self.pauses.append(Pause(self._last, now))
        self._last = now

    def attentive(self) -> None:
        """What was silent until now was the client."""
        self._last = time.monotonic()


class Load:
    """All clients. ``outcomes`` grows as requests end."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        model: str,
        answers: Answers,
        texts: Texts | None,
        pause_seconds: float,
    ) -> None:
        """``texts``: None where no session is asked for. ``pause_seconds``: the shortest silence of a stream that is
        noted."""
        self._url = url
        self._headers = dict(headers)
        self._model = model
        self._answers = answers
        self._texts = texts
        self.pause_seconds = pause_seconds
        self._over = asyncio.Event()
        self.outcomes: list[Outcome] = []

    def end(self) -> None:
        """Ask nothing new; what is asked is waited for."""
        self._over.set()

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Load]:
        """Clients can ask while inside."""
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_READ_BYTES)]
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(socket_options=options, limits=limits)
        async with (
            httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as self._usual,
            httpx.AsyncClient(timeout=REQUEST_SECONDS, transport=transport, trust_env=False) as self._slow,
        ):
            yield self

    async def client(self, number: int, asked: Iterator[Question]) -> None:
        """One client, until the end."""
        for count, question in enumerate(asked):
            if self._over.is_set():
                return
            listener = Listener(self.pause_seconds)
            if question.manner is Manner.REALTIME:
                if self._texts is None:
                    raise BenchError("a session was to be asked for, and nobody knows what it should say")
                fate, detail = await self._session(question, listener, self._texts)
            else:
                body = self._answers.body(question)
                got = await self.ask(question, body, listener)
                fate, detail = self._answers.judge(question, body, got)
            self.outcomes.append(
                Outcome(
                    client=number,
                    number=count,
                    question=question,
                    fate=fate,
                    detail=detail,
                    pauses=listener.pauses if question.manner in (Manner.STREAM, Manner.REALTIME) else [],
                )
            )
            if fate in (Fate.REFUSED, Fate.LOST):
                await asyncio.sleep(RETRY_SECONDS)

    async def ask(self, question: Question, body: Any, listener: Listener) -> Got:
        """Send one request and read its answer as its manner says."""
        got = Got(sent_at=time.time())
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._read(question, body, listener, got)
        except (httpx.HTTPError, TimeoutError) as error:
            got.broken = f"{type(error).__name__}: {error}"
        got.done_at = time.time()
        return got

    async def _read(self, question: Question, body: Any, listener: Listener, got: Got) -> None:
        parts = []
        through = self._slow if question.manner is Manner.SLOW else self._usual
        request = through.build_request("POST", self._url + question.path, json=body, headers=self._headers)
        response = await through.send(request, stream=True)
        try:
            got.status, got.retry_after = response.status_code, "retry-after" in response.headers
            async for part in response.aiter_raw():
                listener.heard()
                parts.append(part)
                if question.manner is Manner.CANCEL and len(parts) >= question.leave_after:
                    got.left = True
                    got.broken = "the client left"
                    return
                if question.manner is Manner.SLOW:
                    await asyncio.sleep(SLOW_PAUSE_SECONDS)
        finally:
            got.body = b"".join(parts)
            await response.aclose()

    async def _session(self, question: Question, listener: Listener, texts: Texts) -> tuple[Fate, str]:
        """Two responses, one after the other, in one conversation."""
        url = f"{self._url.replace('http', 'ws', 1)}{question.path}?model={self._model}"
        try:
            async with (
                asyncio.timeout(REQUEST_SECONDS),
                connect(url, additional_headers=self._headers, proxy=None) as connection,
            ):
                turns: list[tuple[str, str]] = []
                for prompt in question.prompts:
                    part = {"type": "input_text", "text": prompt}
                    item = {"type": "message", "role": "user", "content": [part]}
                    await connection.send(json.dumps({"type": "conversation.item.create", "item": item}))
                    limit = {"max_output_tokens": question.tokens}
                    await connection.send(json.dumps({"type": "response.create", "response": limit}))
                    listener.attentive()
                    turns.append(("user", prompt))
                    said, problem = await _response(connection, listener)
                    if problem:
                        return Fate.LOST, problem
                    expected = texts.text(render_chat(turns), question.tokens)
                    if said != expected:
                        return Fate.WRONG, f"{said!r} for {expected!r}"
                    turns.append(("assistant", said))
        except (WebSocketException, OSError, TimeoutError) as error:
            return Fate.LOST, f"{type(error).__name__}: {error}"
        return Fate.GOOD, ""


async def _response(connection: Any, listener: Listener) -> tuple[str, str]:
    """One response's text, and what went wrong, if anything did."""
    said: list[str] = []
    async for raw in connection:
        event = json.loads(raw)
        if event["type"] == "response.output_text.delta":
            listener.heard()
            said.append(event["delta"])
        elif event["type"] == "error":
            return "", str(event["error"]["code"])
        elif event["type"] == "response.done":
            response = event["response"]
            details = response.get("status_details") or {}
            if details.get("reason") != "max_output_tokens":
                return "", f"{response['status']}: {(details.get('error') or {}).get('code')}"
            text = response["output"][0]["content"][0]["text"]
            return (text, "") if text == "".join(said) else (text, "its deltas are not its text")
    return "", "the session ended"
