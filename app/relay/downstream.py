"""The client's side of a relayed request, as the relay sees it.

Two shells implement :class:`Downstream`: the server's protocol class (``direct``) and the ASGI one (``asgi``).
Sending is synchronous, so that bytes can go from one socket to the other within one callback; a shell that cannot write
at once queues, and asks its observer to pause when the queue grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from app.openai.errors import GatewayError, Header


class ClientGone(Exception):
    """The client closed its connection, or took no bytes for too long."""


class DownstreamObserver(Protocol):
    """What a shell tells the relay. Called on the event loop; must not raise."""

    def client_gone(self) -> None: ...

    def pause(self) -> None:
        """The client is slower than the worker: read no more for now."""
        ...

    def resume(self) -> None: ...


class Downstream(Protocol):
    """Where an answer goes."""

    def client(self) -> str:
        """The client's address, as this process sees it: that of a proxy, if there is one. Empty if it has none."""
        ...

    def observe(self, observer: DownstreamObserver | None) -> None:
        """Who is told about the client. Told at once if the client has left already."""
        ...

    def send_head(self, status: int, headers: list[Header]) -> None: ...

    def send_bytes(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The answer is complete."""
        ...

    def abort(self) -> None:
        """The answer cannot be completed: the client must see a broken connection, not an end."""
        ...

    def settle(self, then: Callable[[], None]) -> None:
        """Nothing follows. Call ``then`` once what was sent is out, or the client given up; at once if that is so."""
        ...


def send_error(downstream: Downstream, error: GatewayError, request_id: bytes) -> int:
    """A whole error response; returns the size of its body."""
    body = error.body
    downstream.send_head(
        error.status,
        [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id),
            *error.headers,
        ],
    )
    downstream.send_bytes(body)
    downstream.end()
    return len(body)
