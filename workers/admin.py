"""The engine's admin port, open from its first moment to its last: probes, metrics, state. Loopback in development.

``/live`` and ``/health`` answer different questions: the first, whether a restart would help; the second, whether this
engine is good for something now: serving, or parked and ready to take over.

What is POSTed is done, for whoever shows the pod's key: its other engines, and people on its machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from workers import metrics
from workers.asgi import Receive, Scope, Send, disconnected, respond, respond_error, respond_json
from workers.contract import Role
from workers.pod_key import HEADER_POD_KEY, shows
from workers.state import EngineState, Promotion

__all__ = ["AdminApp", "EngineState", "Promotion"]

_HEALTHY: Final = {Role.ACTIVE: "serving", Role.HANDOVER: "serving", Role.STANDBY: "parked"}


Answer = tuple[int, object]
"""Status and document."""
Action = Callable[[bytes], Awaitable[Answer]]
"""Gets the request's body. A body that it cannot decode (msgspec.DecodeError) is a 400. Cancelled if whoever asked
leaves."""

MAX_BODY_BYTES: Final = 4096


class AdminApp:
    """ASGI application of the admin port."""

    def __init__(
        self, state: Callable[[], EngineState], *, actions: Mapping[str, Action] | None = None, key: str = ""
    ) -> None:
        """``actions``: what can be POSTed, by path, with the pod's ``key``."""
        self._state = state
        self._actions = actions or {}
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the admin port speaks HTTP only, not {scope['type']}")
        handler = {
            "/live": self._live,
            "/health": self._health,
            "/metrics": self._metrics,
            "/state": self._send_state,
        }
        if scope["path"] in self._actions:
            await self._act(self._actions[scope["path"]], scope, receive, send)
        elif scope["path"] not in handler:
            await respond_error(
                send,
                404,
                message=f"no such path: {scope['path']}",
                kind="invalid_request_error",
                code="not_found",
            )
        elif scope["method"] not in ("GET", "HEAD"):
            await respond_error(
                send,
                405,
                message="the admin port is read with GET",
                kind="invalid_request_error",
                code="method_not_allowed",
            )
        else:
            await handler[scope["path"]](send)

    async def _act(self, action: Action, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await respond_error(
                send,
                405,
                message="this is done with POST",
                kind="invalid_request_error",
                code="method_not_allowed",
            )
            return
        if not self._key or not shows(scope["headers"], self._key):
            await respond_error(
                send,
                401,
                message=f"this is for processes of this pod: {HEADER_POD_KEY} is missing, or not the pod's key",
                kind="invalid_request_error",
                code="invalid_pod_key",
            )
            return
        body = await _small_body(receive)
        try:
            if body is None:
                raise msgspec.DecodeError(f"it is longer than {MAX_BODY_BYTES} bytes, or was not sent to its end")
            answer = await _unless_gone(action(body), receive)
        except msgspec.DecodeError as error:
            await respond_error(
                send,
                400,
                message=f"the body cannot be used: {error}",
                kind="invalid_request_error",
                code="invalid_json",
            )
            return
        if answer is not None:
            await respond_json(send, *answer)

    async def _live(self, send: Send) -> None:
        state = self._state()
        ok = state.role is not Role.FAILED
        await respond_json(
            send,
            200 if ok else 503,
            {"status": "live" if ok else "failed", "reason": state.failure, "pid": state.pid, "role": state.role},
        )

    async def _health(self, send: Send) -> None:
        state = self._state()
        status = _HEALTHY.get(state.role)
        test = state.self_test
        if test is not None and not test.ok:
            status = None
        await respond_json(
            send,
            200 if status else 503,
            {
                "status": status or ("not to be counted on" if test is not None else state.role.lower()),
                "role": state.role,
                "epoch": state.epoch,
                "memory_service": state.memory_service.summary if state.memory_service else None,
                "self_test_ok": test.ok if test else None,
                "self_test_age_seconds": test.age_seconds if test else None,
                "self_test_problem": test.problem if test else None,
            },
        )

    async def _metrics(self, send: Send) -> None:
        state = self._state()
        body = metrics.render(
            epoch=state.epoch,
            steps=state.steps,
            inflight=state.inflight,
            spare=state.spare,
            memory_service=state.memory_service,
        )
        await respond(send, 200, body, content_type=metrics.CONTENT_TYPE)

    async def _send_state(self, send: Send) -> None:
        await respond_json(send, 200, self._state())


async def _unless_gone(action: Awaitable[Answer], receive: Receive) -> Answer | None:
    """What an action answers; None if whoever asked for it leaves first: it is cancelled then."""
    acting, gone = asyncio.ensure_future(action), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({acting, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await acting if acting.done() else None
    finally:
        for task in (acting, gone):
            task.cancel()
        await asyncio.wait({acting, gone})


async def _small_body(receive: Receive) -> bytes | None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            return None
    return body
