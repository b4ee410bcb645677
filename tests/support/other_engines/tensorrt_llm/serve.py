"""As TensorRT-LLM's: its errors are flat."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from generating import answer
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response


class CompletionRequest(BaseModel):
    model: str
    prompt: str
    max_tokens: int = 16
    stream: bool = False


class OpenAIServer:
    def __init__(
        self, generator: Any, model: str, tool_parser: Any, server_role: Any, metadata_server_cfg: Any
    ) -> None:
        self.app = FastAPI()

        @self.app.exception_handler(RequestValidationError)
        async def refuse(_: Request, error: RequestValidationError) -> Response:
            return JSONResponse({"error": str(error)}, status_code=400)

        async def complete(asked: CompletionRequest, request: Request) -> Response:
            if asked.model != model:
                flat = {"object": "error", "message": f"no {asked.model} here", "type": "NotFoundError", "code": 404}
                return JSONResponse(flat, status_code=404)
            return await answer(generator.generating, request, asked, chat=False, most=generator.max_seq_len)

        complete.__annotations__ = {"asked": CompletionRequest, "request": Request, "return": Response}
        self.app.add_api_route("/v1/completions", complete, methods=["POST"], response_model=None)
