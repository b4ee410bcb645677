"""Chat completions, completions, tokens and models: requests parsed and checked, answers as bytes.

Sampling parameters are accepted and have no effect: the sim is greedy. What would change the shape of an answer and is
not there (``n`` other than 1, several prompts) is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from workers.engines.sim import tokens
from workers.engines.sim.api import ApiError, Job, Message, Positive, Stops, chat_prompt, check_model, decode, make_job


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completion requests share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Positive | None = None
    stop: Stops = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=tokens.VOCAB_SIZE)]]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def parse_chat(body: bytes, content_type: bytes, *, model: str, max_model_len: int) -> Job:
    """Check a chat completion request.

    Raises:
        ApiError: 400 or 404, with the parameter that is wrong.
    """
    request: ChatRequest = decode(_chat, body)
    prompt = chat_prompt(request.messages)
    limit = request.max_completion_tokens or request.max_tokens
    return _job(request, prompt, limit, chat=True, model=model, max_model_len=max_model_len)


def parse_completion(body: bytes, content_type: bytes, *, model: str, max_model_len: int) -> Job:
    """Check a completion request. Raises as ``parse_chat``."""
    request: CompletionRequest = decode(_completion, body)
    prompt = _completion_prompt(request.prompt)
    return _job(request, prompt, request.max_tokens, chat=False, model=model, max_model_len=max_model_len)


def tokenize(body: bytes, *, model: str, max_model_len: int) -> bytes:
    """Answer ``POST /tokenize``, for a ``prompt`` or for ``messages``. Raises as ``parse_chat``."""
    request: TokenizeRequest = decode(_tokenize, body)
    check_model(request.model, model)
    if request.prompt is not None:
        ids = tokens.encode(request.prompt)
    elif request.messages is not None:
        ids = chat_prompt(request.messages)
    else:
        raise ApiError(400, "give a prompt or messages", param="prompt")
    return msgspec.json.encode({"count": len(ids), "max_model_len": max_model_len, "tokens": ids})


def detokenize(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /detokenize``. Raises as ``parse_chat``."""
    request: DetokenizeRequest = decode(_detokenize, body)
    check_model(request.model, model)
    return msgspec.json.encode({"prompt": tokens.decode(request.tokens)})


def models_document(model: str, *, max_model_len: int, created: int) -> bytes:
    """The answer to ``GET /v1/models``."""
    entry = {"id": model, "object": "model", "created": created, "owned_by": "hotspare"}
    return msgspec.json.encode({"object": "list", "data": [{**entry, "max_model_len": max_model_len}]})


class AnswerForm:
    """How one request's answer is written: ids and time of creation fixed, one event a token.

    The parts of an event that do not change are encoded once, so that an event costs one concatenation.
    """

    cached_tokens = 0

    def __init__(self, job: Job, *, request_id: str, model: str, created: int) -> None:
        self._job = job
        prefix, kind = ("chatcmpl", "chat.completion") if job.chat else ("cmpl", "text_completion")
        self._object = kind
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{request_id}",
            "object": f"{kind}.chunk" if job.chat and job.stream else kind,
            "created": created,
            "model": model,
        }
        marker = msgspec.json.encode({**self._head, "choices": [self._choice("\0", None)]})
        before, after = marker.split(msgspec.json.encode("\0"))
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self._job.chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def opening(self) -> bytes:
        """What a stream begins with: in a chat, the role."""
        if not self._job.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([choice])

    def text(self, text: str) -> bytes:
        """One event with text."""
        return b"".join((self._before, msgspec.json.encode(text), self._after))

    def last(self, text: str, finish: str) -> bytes:
        """The event that ends the choice."""
        return self._event([self._choice(text, finish)])

    def closing(self, completion_tokens: int) -> bytes:
        """What a stream ends with: usage if asked for, and the marker."""
        usage = self._event([], usage=self._usage(completion_tokens)) if self._job.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def document(self, text: str, finish: str, completion_tokens: int) -> bytes:
        """The whole answer of a request that does not stream."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._job.chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": self._usage(completion_tokens)})

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self._job.prompt)
        cached = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}} if self.cached_tokens else {}
        return {
            **cached,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"


def _completion_prompt(prompt: str | list[int | str | list[int]]) -> list[int]:
    """The token ids of a prompt given as text, as token ids, or as a list with one of either."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(400, "several prompts in one request are not supported", param="prompt")
        return _completion_prompt(prompt[0] if isinstance(prompt[0], str) else list(prompt[0]))
    if isinstance(prompt, str):
        ids = tokens.encode(prompt)
    else:
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) != len(prompt) or not all(0 <= token < tokens.VOCAB_SIZE for token in ids):
            message = f"a prompt of token ids holds nothing but numbers from 0 to {tokens.VOCAB_SIZE - 1}"
            raise ApiError(400, message, param="prompt")
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    return ids


def _job(request: _Common, prompt: list[int], limit: int | None, *, chat: bool, model: str, max_model_len: int) -> Job:
    check_model(request.model, model)
    if request.n not in (None, 1):
        raise ApiError(400, f"n={request.n} is not supported: one choice a request", param="n")
    options = request.stream_options
    return make_job(
        prompt,
        limit,
        max_model_len=max_model_len,
        param="messages" if chat else "prompt",
        stop=request.stop,
        stream=request.stream,
        chat=chat,
        include_usage=bool(options and options.include_usage),
    )
