"""``POST /v1/responses``: OpenAI's newer form, with named events and nothing kept between requests."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.engines.sim import tokens
from workers.engines.sim.api import ApiError, Job, Positive, TextPart, check_model, decode, make_job


class InputItem(msgspec.Struct, frozen=True):
    role: str = ""
    content: str | list[TextPart] = ""
    type: str = "message"


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None


_responses = msgspec.json.Decoder(ResponsesRequest)
_TEXTS = ("input_text", "output_text", "text")


def parse_responses(body: bytes, content_type: bytes, *, model: str, max_model_len: int) -> Job:
    """Check a request.

    Raises:
        ApiError: 400 or 404, with the parameter that is wrong.
    """
    request: ResponsesRequest = decode(_responses, body)
    check_model(request.model, model)
    for name in ("background", "previous_response_id"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not supported: no answer is kept", param=name)
    turns = [("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        turns.append(("user", request.input))
    else:
        turns += [(item.role, _text(item)) for item in request.input]
    prompt = tokens.encode(tokens.render_chat(turns))
    return make_job(
        prompt, request.max_output_tokens, max_model_len=max_model_len, param="input", stream=request.stream
    )


def _text(item: InputItem) -> str:
    if item.type != "message" or not item.role:
        raise ApiError(400, f"an input item of type {item.type!r} is not supported", param="input")
    if isinstance(item.content, str):
        return item.content
    for part in item.content:
        if part.type not in _TEXTS:
            raise ApiError(400, f"content of type {part.type!r} is not supported", param="input")
    return "".join(part.text for part in item.content)


class ResponsesForm:
    """One message as the only output item. Events are numbered."""

    cached_tokens = 0

    def __init__(self, job: Job, *, request_id: str, model: str, created: int) -> None:
        self._job = job
        self._number = 0
        self._said = ""
        self._finish = ""
        self._id = f"resp_{request_id}"
        self._item_id = f"msg_{request_id}"
        self._model = model
        self._created = created

    def opening(self) -> bytes:
        item = self._item("in_progress")
        return b"".join(
            (
                self._event("response.created", response=self._response("in_progress")),
                self._event("response.in_progress", response=self._response("in_progress")),
                self._event("response.output_item.added", output_index=0, item={**item, "content": []}),
                self._event("response.content_part.added", **self._where, part=_part("")),
            )
        )

    def text(self, text: str) -> bytes:
        self._said += text
        return self._event("response.output_text.delta", **self._where, delta=text, logprobs=[])

    def last(self, text: str, finish: str) -> bytes:
        delta = self.text(text) if text else b""
        self._finish = finish
        return b"".join(
            (
                delta,
                self._event("response.output_text.done", **self._where, text=self._said, logprobs=[]),
                self._event("response.content_part.done", **self._where, part=_part(self._said)),
                self._event("response.output_item.done", output_index=0, item=self._item(self._status)),
            )
        )

    def closing(self, completion_tokens: int) -> bytes:
        status = self._status
        return self._event(f"response.{status}", response=self._response(status, completion_tokens))

    def document(self, text: str, finish: str, completion_tokens: int) -> bytes:
        self._said, self._finish = text, finish
        return msgspec.json.encode(self._response(self._status, completion_tokens))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" and self._job.limited else "completed"

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part(self._said)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, completion_tokens: int | None = None) -> dict[str, Any]:
        job = self._job
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": job.max_tokens,
            "metadata": {},
            "model": self._model,
            "output": [] if completion_tokens is None else [self._item(status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 0.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None
            if completion_tokens is None
            else {
                "input_tokens": len(job.prompt),
                "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(job.prompt) + completion_tokens,
            },
        }

    def _event(self, name: str, **fields: Any) -> bytes:
        document = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
