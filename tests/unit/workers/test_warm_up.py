"""Requests that nobody waits for: they have an end, and what becomes of them is nobody's failure."""

from __future__ import annotations

import asyncio

import pytest

from workers.asgi import Receive, Scope, Send, respond
from workers.engine import ASGIApp
from workers.engines.vllm.warm_up import warm_up


class App:
    """Answers, and does what ``does`` says to the request of that number."""

    def __init__(self, **does: str) -> None:
        self._does = does
        self.paths: list[str] = []
        self.cancelled = False
        self.came = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self.came.set()
        match self._does.get(f"at{len(self.paths)}"):
            case "raise":
                raise RuntimeError("no template")
            case "refuse":
                await respond(send, 400, b"no such model")
            case "hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled = True
                    raise
            case _:
                await respond(send, 200, b"{}")


async def run(app: ASGIApp, *, tasks: tuple[str, ...] = ("generate",)) -> None:
    async with asyncio.timeout(5):
        await warm_up(app, model="m", tasks=tasks, request_seconds=0.05)


async def test_all_routes_that_clients_begin_with_are_asked() -> None:
    app = App()
    await run(app)
    assert app.paths == ["/v1/chat/completions"] * 2 + ["/v1/completions"] * 2 + ["/v1/models"]


async def test_a_model_that_generates_nothing_is_asked_nothing() -> None:
    app = App()
    await run(app, tasks=("embed",))
    assert app.paths == []


async def test_failures_are_logged_and_the_rest_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    app = App(at1="raise", at2="refuse")
    await run(app)
    assert len(app.paths) == 5
    assert "warm-up: /v1/chat/completions failed: no template" in caplog.text
    assert "warm-up: /v1/chat/completions answered 400: no such model" in caplog.text


async def test_one_that_hangs_is_given_up_and_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    app = App(at3="hang")
    await run(app)
    assert (len(app.paths), app.cancelled) == (3, True)
    assert "/v1/completions did not answer within 0.05 s" in caplog.text


async def test_it_can_be_cancelled() -> None:
    app = App(at1="hang")
    warming = asyncio.create_task(warm_up(app, model="m", tasks=("generate",)))
    async with asyncio.timeout(5):
        await app.came.wait()
    warming.cancel()
    await asyncio.wait({warming})
    assert warming.cancelled()
    assert app.cancelled
