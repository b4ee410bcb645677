"""The engine's admin port, open from its first moment to its last: probes, metrics, state. Loopback in development.

``/live`` and ``/health`` answer different questions: the first, whether a restart would help; the second, whether this
engine is good for something now: serving, or parked and ready to take over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from workers import metrics
from workers.asgi import Receive, Scope, Send, respond, respond_error, respond_json
from workers.contract import Role
from workers.state import EngineState, Promotion

__all__ = ["AdminApp", "EngineState", "Promotion"]

_HEALTHY: Final = {Role.ACTIVE: "serving", Role.HANDOVER: "serving", Role.STANDBY: "parked"}


class AdminApp:
    """ASGI application of the admin port."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the admin port speaks HTTP only, not {scope['type']}")
        handler = {
            "/live": self._live,
            "/health": self._health,
            "/metrics": self._metrics,
            "/state": self._send_state,
        }
        if scope["path"] not in handler:
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
        await respond_json(
            send,
            200 if status else 503,
            {
                "status": status or state.role.lower(),
                "role": state.role,
                "epoch": state.epoch,
                "memory_service": state.memory_service.summary if state.memory_service else None,
            },
        )

    async def _metrics(self, send: Send) -> None:
        state = self._state()
        body = metrics.render(
            epoch=state.epoch, steps=state.steps, inflight=state.inflight, memory_service=state.memory_service
        )
        await respond(send, 200, body, content_type=metrics.CONTENT_TYPE)

    async def _send_state(self, send: Send) -> None:
        await respond_json(send, 200, self._state())
