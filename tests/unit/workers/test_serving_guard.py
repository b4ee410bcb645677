"""What a dead engine's application says does not leave; nothing is left listening in a fork."""

from __future__ import annotations

import asyncio
from typing import Any

from workers.asgi import Message, Receive, Scope, Send
from workers.serving import Change, ServingApp


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


async def relayed(dies_at: int) -> tuple[list[Any], bool, bool]:
    """The messages that left, whether the death was told, and whether the request is still being answered."""
    app, told, sent = App(dies_at), asyncio.Event(), []

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
    scope = {"type": "http", "path": "/v1/completions", "method": "POST"}
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
    assert await relayed(99) == (whole, False, False)
    for dies_at in range(3):
        assert await relayed(dies_at) == (whole[:dies_at], True, True)
