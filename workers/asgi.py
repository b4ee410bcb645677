"""Small pieces of ASGI that serving and admin app share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

UNRESUMABLE: Final = "hotspare.unresumable"
"""Key of a request's scope: why nobody could go on with its answer, one word. Not there: nobody has said so."""


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    headers: Iterable[tuple[str, str]] = (),
) -> None:
    """One whole response."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type.encode()),
                (b"content-length", b"%d" % len(body)),
                *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, status: int, document: object, *, headers: Iterable[tuple[str, str]] = ()) -> None:
    await respond(send, status, msgspec.json.encode(document), headers=headers)


async def respond_error(
    send: Send, status: int, *, message: str, kind: str, code: str, headers: Iterable[tuple[str, str]] = ()
) -> None:
    """The OpenAI error envelope."""
    error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    await respond_json(send, status, error, headers=headers)


async def disconnected(receive: Receive) -> None:
    """Until the client has gone; once the body has been received."""
    while (await receive())["type"] != "http.disconnect":
        pass
