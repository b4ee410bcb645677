"""What a dead engine's application says does not leave; who is let in, by token and by room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asgi import AsgiAnswer, ask
from workers import serving as serving_module
from workers.asgi import Message, Receive, Scope, Send
from workers.change import Change
from workers.contract import HEADER_WORKER_TOKEN
from workers.engine import ASGIApp
from workers.http_server import serve_http
from workers.resume import RESUME_CONTENT_TYPE
from workers.serving import ServingApp
from workers.settings import EngineSettings
from workers.worker_token import WorkerTokens


class App:
    """An engine's application that dies at a chosen message."""

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at
        self.dead = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = [
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
            {"type": "http.response.body", "body": b"data: [DONE]\n\n"},
        ]
        for number, message in enumerate(messages):
            self.dead = self.dead or number == self.dies_at
            await send(message)


async def relayed(app: App | Ends) -> tuple[list[Any], bool, bool]:
    """The messages that left, whether the death was told, and whether the request is still being answered."""
    told = asyncio.Event()
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", message["type"]))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    serving = ServingApp(
        app,
        watch_line=lambda _: (_ for _ in ()).throw(AssertionError("nobody watches")),
        change=Change(),
        capacity=4,
        heartbeat_seconds=1,
        is_dead=lambda: app.dead,
        on_dead=told.set,
    )
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    task = asyncio.create_task(serving(scope, receive, send))
    ending = asyncio.create_task(told.wait())
    async with asyncio.timeout(5):
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
    going_on = not task.done()
    task.cancel()
    ending.cancel()
    await asyncio.wait({task, ending})
    return sent, told.is_set(), going_on


async def test_nothing_leaves_from_the_death_on() -> None:
    whole = ["http.response.start", b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert await relayed(App(99)) == (whole, False, False)
    for dies_at in range(3):
        assert await relayed(App(dies_at)) == (whole[:dies_at], True, True)


class Ends:
    """An application that ends without an answer: it returns, or raises."""

    def __init__(self, how: str, *, dead: bool = False, begins: bool = False) -> None:
        self.how, self.dead, self.begins = how, False, begins
        self._dies = dead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        self.dead = self._dies
        if self.how == "raises":
            raise RuntimeError("a mistake of the engine's")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_dead_engine_answers_nothing_by_ending(how: str, begins: bool) -> None:
    sent, told, going_on = await relayed(Ends(how, dead=True, begins=begins))
    assert (sent, told, going_on) == (["http.response.start"] if begins else [], True, True)


async def test_a_living_engine_that_fails_on_a_request_says_so_in_the_envelope() -> None:
    answer = await ask(gate(Ends("raises")), "/v1/completions", b"{}", NEW)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (500, "internal_error")
    with pytest.raises(RuntimeError, match="a mistake of the engine's"):
        await ask(gate(Ends("raises", begins=True)), "/v1/completions", b"{}", NEW)


async def test_what_is_cancelled_or_given_no_answer_breaks_off() -> None:
    """uvicorn would answer 500 in plain text, which a client would be given as its answer."""
    app = Held()

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/cancelled":
            return
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await app(scope, receive, send)

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with serve_http(answers, sock):
        for path in (b"/returns", b"/cancelled"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % path)
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()


class Held:
    """An application whose requests stay until they are let go."""

    def __init__(self) -> None:
        self.arrived = 0
        self.over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived += 1
        await self.over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def gate(app: ASGIApp, *, tokens: WorkerTokens | None = None) -> ServingApp:
    return ServingApp(
        app,
        watch_line=lambda _: (_ for _ in ()).throw(AssertionError("nobody watches")),
        change=Change(),
        capacity=2,
        heartbeat_seconds=1,
        is_dead=lambda: False,
        on_dead=lambda: None,
        tokens=tokens,
    )


RESUME = (b"content-type", RESUME_CONTENT_TYPE.encode())
NEW = (b"content-type", b"application/json")


@contextlib.asynccontextmanager
async def asking(serving: ServingApp, *kinds: tuple[bytes, bytes]) -> AsyncIterator[list[asyncio.Task[AsgiAnswer]]]:
    """One request for each kind, in this order; all have met the gate."""
    tasks = []
    for kind in kinds:
        tasks.append(asyncio.create_task(ask(serving, "/v1/completions", b"{}", kind)))
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_streams_that_come_back_after_a_promotion_find_a_place_behind_new_requests() -> None:
    app = Held()
    serving = gate(app)
    async with asking(serving, NEW, NEW, RESUME, NEW, RESUME, RESUME) as tasks:
        assert [task.done() for task in tasks] == [False, False, False, True, False, True]
        assert [(await tasks[at]).status for at in (3, 5)] == [503, 503]
        assert (serving.inflight, serving.refused, app.arrived) == (4, 2, 4)
        app.over.set()
        assert [(await tasks[at]).status for at in (0, 1, 2, 4)] == [200] * 4
    assert serving.inflight == 0


async def test_long_after_a_promotion_a_resume_is_a_request_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "RETURNING_SECONDS", -1.0)
    async with asking(gate(Held()), RESUME, RESUME, RESUME) as tasks:
        assert [task.done() for task in tasks] == [False, False, True]
        refusal = await tasks[2]
        assert (refusal.status, refusal.headers[b"x-hotspare-reselect"]) == (503, b"1")


async def test_who_has_no_token_cannot_resume(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("right\n")
    app = Held()
    app.over.set()
    serving = gate(app, tokens=WorkerTokens(EngineSettings(worker_token_file=tmp_path / "tokens")))
    for token, status in ((b"wrong", 401), (b"", 401), (b"right", 200)):
        shown = [(HEADER_WORKER_TOKEN.encode(), token)] if token else []
        answer = await ask(serving, "/v1/completions", b"{}", RESUME, *shown)
        assert answer.status == status
        if status == 401:
            assert json.loads(answer.body)["error"]["code"] == "invalid_worker_token"
    assert app.arrived == 1
