"""When a promoted engine has answered for the first time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from workers.asgi import Message, Receive, Scope, Send
from workers.first_token import ASKED_WITHIN_SECONDS, FirstToken

HTTP: Scope = {"type": "http", "method": "POST", "path": "/v1/completions"}


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def ask(app: FirstToken, method: str = "POST") -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**HTTP, "method": method}, nothing, send)
    return sent


def answering(status: int, *bodies: bytes) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    return app


async def test_the_first_bytes_count_and_no_others() -> None:
    told: list[float] = []
    app = FirstToken(answering(200, b"", b"a", b"b"), since=time.monotonic() - 1.0, told=told.append)
    assert [message.get("body") for message in await ask(app)] == [None, b"", b"a", b"b"]
    await ask(app)
    assert len(told) == 1
    assert 1.0 <= told[0] < 2.0


@pytest.mark.parametrize("app", [answering(503, b"full"), answering(200), answering(200, b"")])
async def test_what_is_no_answer_ends_no_recovery(app: Any) -> None:
    told: list[float] = []
    await ask(FirstToken(app, since=time.monotonic(), told=told.append))
    assert told == []


async def test_the_engine_s_own_look_is_no_answer() -> None:
    told: list[float] = []
    app = FirstToken(answering(200, b"a"), since=time.monotonic(), told=told.append)
    await ask(app, "GET")
    assert told == []
    await ask(app)
    assert len(told) == 1


async def test_who_comes_later_did_not_wait() -> None:
    told: list[float] = []
    app = FirstToken(answering(200, b"a"), since=time.monotonic() - ASKED_WITHIN_SECONDS - 1, told=told.append)
    assert len(await ask(app)) == 2
    assert told == []
