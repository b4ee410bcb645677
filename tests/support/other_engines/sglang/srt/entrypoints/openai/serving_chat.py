"""As SGLang's."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from generating import answer
from starlette.responses import Response


class OpenAIServingChat:
    def __init__(self, tokenizer_manager: Any, template_manager: Any) -> None:
        self.tokenizer_manager = tokenizer_manager

    async def handle_request(self, request: Any, raw_request: Request) -> Response:
        manager = self.tokenizer_manager
        most = manager.server_args.context_length
        return await answer(manager.generating, raw_request, request, chat=True, most=most)
