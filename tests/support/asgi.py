"""One request to an ASGI application, without a server."""

from __future__ import annotations

import asyncio

from workers.asgi import Message
from workers.engine import ASGIApp


class AsgiAnswer:
    """What was sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.parts.append(message["body"])
            self.ended = not message.get("more_body", False)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


async def ask(
    app: ASGIApp, path: str, body: bytes, *headers: tuple[bytes, bytes], gone: asyncio.Event | None = None
) -> AsgiAnswer:
    """POST; the client leaves when ``gone`` is set, and otherwise stays."""
    bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    leaving = gone or asyncio.Event()

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await leaving.wait()
        return {"type": "http.disconnect"}

    answer = AsgiAnswer()
    await app({"type": "http", "method": "POST", "path": path, "headers": list(headers)}, receive, answer.send)
    return answer
