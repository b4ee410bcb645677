"""A request that asks for an upgrade which nobody here does is an ordinary request."""

from __future__ import annotations

import asyncio
import logging

import pytest

from workers.asgi import Receive, Scope, Send
from workers.binding import bind
from workers.http_server import serve_http


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def test_it_is_answered_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with caplog.at_level(logging.DEBUG):
        async with serve_http(hello, sock):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
            )
            async with asyncio.timeout(5):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                await reader.readuntil(b"hello")
            writer.close()
            await writer.wait_closed()
    assert not [record for record in caplog.records if "WebSocket" in record.message or "pgrade" in record.message]
