"""Ports of earlier epochs: each is closed with the last of its requests, all at the end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from workers.change import Change
from workers.http_server import HttpServer
from workers.older_ports import OlderPorts
from workers.serving import ServingApp
from workers.serving_port import ServingPort


class Closing:
    """A port with one request, and the stack that closes it."""

    def __init__(self, ended: Change) -> None:
        app = ServingApp(
            cast(Any, None),
            watch_line=cast(Any, None),
            change=Change(),
            capacity=1,
            heartbeat_seconds=1,
            is_dead=lambda: False,
            on_dead=lambda: None,
            ended=ended,
        )
        self.port = ServingPort(app, cast(HttpServer, None), epoch=1)
        self.scope = {"type": "http", "path": "/v1/completions", "headers": ()}
        app.requests.enter(self.scope)
        self.closed = asyncio.Event()
        self.stack = AsyncExitStack()
        self.stack.callback(self.closed.set)


async def test_a_port_is_closed_and_forgotten_with_its_last_request() -> None:
    ended, apps = Change(), list[ServingApp]()
    async with OlderPorts(apps, ended=ended) as older:
        one, other = Closing(ended), Closing(ended)
        for closing in (one, other):
            older.add(closing.port, closing.stack)
        await asyncio.sleep(0)
        one.port.app.requests.leave(one.scope)
        async with asyncio.timeout(5):
            await one.closed.wait()
        assert (older.ports, apps) == ([other.port], [other.port.app])
        assert not other.closed.is_set()
    assert other.closed.is_set()
    assert (older.ports, apps) == ([], [])


async def test_a_port_whose_closing_fails_is_forgotten_too_and_said(caplog: pytest.LogCaptureFixture) -> None:
    ended, apps = Change(), list[ServingApp]()

    async def fail() -> None:
        raise RuntimeError("it does not close")

    async with OlderPorts(apps, ended=ended) as older:
        closing = Closing(ended)
        closing.stack.push_async_callback(fail)
        older.add(closing.port, closing.stack)
    await asyncio.sleep(0)
    assert (older.ports, apps) == ([], [])
    assert "the serving port of epoch 1 was not closed in order: it does not close" in caplog.text
