"""As SGLang's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class CompletionRequest(BaseModel):
    model: str
    prompt: str
    max_tokens: int = 16
    stream: bool = False


class ChatCompletionRequest(BaseModel):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 16
    stream: bool = False
