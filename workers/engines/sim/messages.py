"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from workers.engines.sim import tokens
from workers.engines.sim.api import ApiError, Job, Message, Positive, TextPart, check_model, decode, make_job

Turns = Annotated[list[Message], msgspec.Meta(min_length=1)]


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: Turns
    model: str | None = None
    system: str | list[TextPart] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=4)] | None = None


_count = msgspec.json.Decoder(CountRequest)
_messages = msgspec.json.Decoder(MessagesRequest)


def parse_messages(body: bytes, content_type: bytes, *, model: str, max_model_len: int) -> Job:
    """Check a request.

    Raises:
        ApiError: 400 or 404, with the parameter that is wrong.
    """
    request: MessagesRequest = decode(_messages, body)
    check_model(request.model, model)
    return make_job(
        _prompt(request),
        request.max_tokens,
        max_model_len=max_model_len,
        param="messages",
        stop=request.stop_sequences,
        stream=request.stream,
    )


def count_tokens(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /v1/messages/count_tokens``. Raises as ``parse_messages``."""
    request: CountRequest = decode(_count, body)
    check_model(request.model, model)
    return msgspec.json.encode({"input_tokens": len(_prompt(request))})


def _prompt(request: CountRequest) -> list[int]:
    turns = [("system", _text(request.system))] if request.system else []
    turns += [(message.role, _text(message.content)) for message in request.messages]
    return tokens.encode(tokens.render_chat(turns))


def _text(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            raise ApiError(400, f"content of type {part.type!r} is not supported", param="messages")
    return "".join(part.text for part in content)


class MessagesForm:
    """One text block."""

    cached_tokens = 0

    def __init__(self, job: Job, *, request_id: str, model: str, created: int) -> None:
        self._job = job
        self._finish = ""
        self._head: dict[str, Any] = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}

    def opening(self) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return b"".join(
            (
                _event("message_start", message=message),
                _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            )
        )

    def text(self, text: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def last(self, text: str, finish: str) -> bytes:
        self._finish = finish
        return (self.text(text) if text else b"") + _event("content_block_stop", index=0)

    def closing(self, completion_tokens: int) -> bytes:
        delta = {"stop_reason": _reason(self._finish), "stop_sequence": None}
        usage = {"output_tokens": completion_tokens}
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def document(self, text: str, finish: str, completion_tokens: int) -> bytes:
        return msgspec.json.encode(
            {
                **self._head,
                "content": [{"type": "text", "text": text}],
                "stop_reason": _reason(finish),
                "stop_sequence": None,
                "usage": self._usage(completion_tokens),
            }
        )

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        return {"input_tokens": len(self._job.prompt), "output_tokens": completion_tokens}


def _reason(finish: str) -> str:
    return "max_tokens" if finish == "length" else "end_turn"


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
