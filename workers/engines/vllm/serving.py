"""vLLM's OpenAI application, and which of its routes are served.

The application is vLLM's, its answers are not touched. But a route that is not for clients (sleep, weights, profiles,
adapters, aborting others' requests) would let one of them break the failover, so only the routes named here exist.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import MutableMapping
from typing import Any, Final

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from workers.engine import ASGIApp
from workers.engines.vllm import shims
from workers.engines.vllm.admission import AdmissionApp, limits
from workers.recorded import RecordedApp

_SERVED: Final = frozenset(
    {
        "/classify",
        "/detokenize",
        "/health",
        "/metrics",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v2/rerank",
        "/version",
    }
)
_SERVED_UNDER: Final = (
    "/v1/audio/",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/models",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)


class _NoServer:
    """Stands where vLLM expects its HTTP server.

    Its handler for a dead engine sets ``should_exit`` there and would fail without it; what follows an engine's death
    is not for the application to decide, so nothing reads it.
    """

    should_exit = False


class EngineApp:
    """vLLM's application as the caller serves it: any number of times, with the ASGI lifespan on or off.

    vLLM's own lifespan deletes the application's state when a server stops; after a hand-over that is taken back the
    same application is served again, so lifespan events are answered here and never reach it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


async def build(llm: Any, namespace: argparse.Namespace, tasks: Any) -> EngineApp:
    """The application over a running AsyncLLM, with the routes that are for clients, and notes for gateways."""
    app = await asyncio.to_thread(build_app, namespace, tasks, llm.model_config)
    app.router.routes[:] = [route for route in app.router.routes if is_served(getattr(route, "path", ""))]
    await init_app_state(llm, app.state, namespace, tasks)
    shims.replace_choices()
    app.state.server = _NoServer()
    return EngineApp(RecordedApp(AdmissionApp(app) if limits(llm.scheduler_config) else app))


def is_served(path: str) -> bool:
    """Whether a route of vLLM's is for clients."""
    return path in _SERVED or path.startswith(_SERVED_UNDER)
