"""The events of a streaming chat completion, as far as a realtime response is made from them. [P]"""

from __future__ import annotations

import msgspec


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class Choice(msgspec.Struct, frozen=True):
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class StreamError(msgspec.Struct, frozen=True):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event, or a whole error body: that has ``error`` alone."""

    choices: list[Choice] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | None = None
    error: StreamError | None = None


_chunk = msgspec.json.Decoder(ChatChunk)


def decode_chunk(data: bytes) -> ChatChunk | None:
    """``None``: it is no event of a chat completion."""
    try:
        chunk = _chunk.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    says_nothing = chunk.choices is msgspec.UNSET and chunk.usage is None and chunk.error is None
    return None if says_nothing else chunk
