"""HEAD and OPTIONS, for every route there is: no route has to know of them."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match

from app.clients.asgi import Message, Scope, Send


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """What is answered on the path of ``scope``, in alphabetical order; empty if there is no such path."""
    asked: dict[str, object] = {**scope, "method": "GET"}
    found: set[str] = set()
    for route in routes:
        match, _ = route.matches(asked)
        if match is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return with_general(found)


def with_general(methods: Iterable[str]) -> list[str]:
    """HEAD is GET without its body; OPTIONS always says what there is."""
    found = set(methods)
    if "GET" in found:
        found.add("HEAD")
    if found:
        found.add("OPTIONS")
    return sorted(found)


def without_body(send: Send) -> Send:
    """An answer's head alone, which says how long its body would be."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
