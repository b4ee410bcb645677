"""What the sim's routes share: errors, checked requests, and how an answer is written as it is generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from workers.engines.sim import tokens

DEFAULT_MAX_TOKENS = 64

_MISSING = re.compile(r"required field `(.+?)`")
_INSIDE = re.compile(r" - at `\$\.(.+?)`$")

Stops = str | Annotated[list[str], msgspec.Meta(max_length=4)] | None
Positive = Annotated[int, msgspec.Meta(ge=1)]


class ApiError(Exception):
    """An answer in the OpenAI error envelope. ``kind`` is its ``type``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = tuple(headers)
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: what to generate, and in which form to answer."""

    prompt: list[int]
    max_tokens: int
    stops: tuple[str, ...] = ()
    stream: bool = False
    chat: bool = False
    """Of the two forms of completions."""
    include_usage: bool = False
    limited: bool = True
    """Whether the length is the client's wish; if not, a full answer is taken for one that came to its end."""


class Form(Protocol):
    """How one request's answer is written: whole, or event by event. One form writes one answer, once."""

    cached_tokens: int
    """How many of the prompt's tokens came from the prefix cache; set before an answer ends."""

    def opening(self) -> bytes:
        """What a stream begins with."""

    def text(self, text: str) -> bytes:
        """One event with text."""

    def last(self, text: str, finish: str) -> bytes:
        """What ends the text; ``finish`` is ``stop`` or ``length``."""

    def closing(self, completion_tokens: int) -> bytes:
        """What a stream ends with, its end marker last."""

    def document(self, text: str, finish: str, completion_tokens: int) -> bytes:
        """The whole answer of a request that does not stream."""


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), param=_param(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _param(message: str) -> str | None:
    """The parameter that a message of msgspec is about."""
    missing, inside = _MISSING.search(message), _INSIDE.search(message)
    names = [found[1] for found in (inside, missing) if found]
    return ".".join(names) or None


def check_model(asked: str | None, model: str) -> None:
    if asked is not None and asked != model:
        message = f"the model `{asked}` does not exist; this server has `{model}`"
        raise ApiError(404, message, code="model_not_found", param="model")


def chat_prompt(messages: Sequence[Message]) -> list[int]:
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type != "text":
                raise ApiError(400, f"content of type {part.type!r} is not supported", param="messages")
    return tokens.encode(tokens.render_chat((message.role, message.text) for message in messages))


def make_job(
    prompt: list[int],
    limit: int | None,
    *,
    max_model_len: int,
    param: str,
    stop: Stops = None,
    stream: bool | None = False,
    chat: bool = False,
    include_usage: bool = False,
) -> Job:
    """Check lengths and stop strings; ``param`` is what the prompt is called on this route.

    Raises:
        ApiError: 400.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise ApiError(400, "a stop string cannot be empty", param="stop")
    room = max_model_len - len(prompt)
    if room < (limit or 1):
        message = (
            f"the model's context is {max_model_len} tokens; the request asks for {len(prompt)} in the prompt "
            f"and {limit or 1} in the completion"
        )
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return Job(
        chat=chat,
        prompt=prompt,
        max_tokens=limit or min(DEFAULT_MAX_TOKENS, room),
        stops=stops,
        stream=bool(stream),
        include_usage=bool(stream) and include_usage,
        limited=limit is not None,
    )
