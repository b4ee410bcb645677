"""SGLang's OpenAI serving classes behind two routes. Its own server is not used: it wants an ASGI lifespan, in which it
would also start a warm-up over HTTP, and an application that is a module's global."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from workers.engine import ASGIApp

if TYPE_CHECKING:
    from workers.engines.sglang.engine import Interface


def build(engine: Any, interface: Interface, *, name: str) -> ASGIApp:
    """Chat completions, completions and models over ``engine``."""
    app = FastAPI(openapi_url=None)
    manager, templates = engine.tokenizer_manager, engine.template_manager
    chat = interface.chat(manager, templates)
    completion = interface.completion(manager, templates)

    async def answer(handler: Any, form: Any, request: Request) -> Any:
        try:
            asked = form.model_validate_json(await request.body())
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            return _refused(400, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", None)
        if asked.model != name:
            return _refused(404, f"the model `{asked.model}` does not exist; this server has `{name}`", "model")
        said = await handler.handle_request(asked, request)
        return said if isinstance(said, Response) else JSONResponse(said.model_dump(mode="json"))

    async def chat_completions(request: Request) -> Any:
        return await answer(chat, interface.chat_request, request)

    async def completions(request: Request) -> Any:
        return await answer(completion, interface.completion_request, request)

    async def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "sglang"}]}

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    return app


def _refused(status: int, message: str, param: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=status)
