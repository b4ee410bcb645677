"""The OpenAI routes: relayed ones as raw ASGI endpoints, and the list of models."""

from __future__ import annotations

from fastapi import APIRouter

from app.clients.asgi import AsgiDownstream, Receive, Scope, Send
from app.fleet.registry import WorkerRegistry
from app.intake.arrival import Arrival, Intake
from app.openai.errors import GatewayError, body_too_large, model_not_found, not_found
from app.openai.surface import RelayRoute
from app.relay.downstream import ClientGone


class RelayEndpoint:
    """One relayed route as an ASGI application."""

    def __init__(
        self, route: RelayRoute, intake: Intake, *, body_timeout_seconds: float, write_timeout_seconds: float
    ) -> None:
        self.route = route
        self._intake = intake
        self._body_timeout = body_timeout_seconds
        self._write_timeout = write_timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        downstream = AsgiDownstream(scope, receive, send, write_timeout=self._write_timeout)
        query: bytes = scope["query_string"]
        target: bytes = scope["raw_path"]
        arrival = Arrival(
            self._intake,
            self.route,
            downstream,
            target=target + b"?" + query if query else target,
            headers=scope["headers"],
        )
        try:
            arrival.begin()
            if not arrival.over:
                await self._take_body(arrival, receive)
                downstream.watch_client()
            await downstream.run()
        finally:
            arrival.leave()
            downstream.close()

    async def _take_body(self, arrival: Arrival, receive: Receive) -> None:
        try:
            body = await self._read_body(receive)
        except GatewayError as error:
            arrival.refuse(error)
        except ClientGone:
            arrival.leave()
        else:
            arrival.body(body)

    async def _read_body(self, receive: Receive) -> bytes:
        """The whole body, bounded in size and time."""
        limit = self._intake.max_body_bytes
        body: bytes | bytearray = b""
        async with self._intake.uploads.within(self._body_timeout, lambda: len(body)):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part: bytes = message.get("body", b"")
                if len(body) + len(part) > limit:
                    raise body_too_large(limit)
                if not body:
                    body = part
                else:  # not a list: a body may come in very small parts
                    body = body if isinstance(body, bytearray) else bytearray(body)
                    body += part
                if not message.get("more_body", False):
                    return bytes(body)


def models_router(registry: WorkerRegistry, *, created: int) -> APIRouter:
    """``GET /v1/models``: what can be reached now. ``created`` is Unix seconds."""
    router = APIRouter()

    def describe(model: str, length: int) -> dict[str, object]:
        found: dict[str, object] = {"id": model, "object": "model", "created": created, "owned_by": "hotspare"}
        return found | {"max_model_len": length} if length else found  # as vLLM says it

    @router.get("/v1/models")
    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [describe(*item) for item in registry.reachable_models().items()]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, object]:
        if not model:
            raise not_found("/v1/models/", because="There is no route '/v1/models/' here; did you mean /v1/models?")
        length = registry.reachable_models().get(model)
        if length is None:
            raise model_not_found(model)
        return describe(model, length)

    return router
