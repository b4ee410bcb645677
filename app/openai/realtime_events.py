"""The events of the OpenAI Realtime protocol, as far as it carries text. [P]

What a client sends is decoded strictly: a field that is not known is refused with its name, because one that is passed
over in silence would be taken for granted. Fields that are known and have no meaning here (audio, prompts, tracing) are
refused with a sentence when they are used. The names are those of the generally available protocol: sessions of type
``realtime``, ``output_modalities``, ``response.output_text.delta``. Its beta is not spoken.

What the server sends are plain objects, encoded by :func:`encode`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

MAX_EVENT_ID: Final = 512
MAX_ID: Final = 128
MAX_TOOLS: Final = 128
MAX_METADATA: Final = 16

Anything: TypeAlias = object
Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
TokenLimit: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 31)] | Literal["inf"]
Modalities: TypeAlias = Annotated[tuple[Literal["text", "audio"], ...], Meta(max_length=2)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]
T = TypeVar("T")


class RealtimeProblem(Exception):
    """What is wrong with a client's event: becomes an ``error`` event, and the session goes on."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        type: str = "invalid_request_error",
        event_id: str | None = None,
    ) -> None:
        """``event_id``: of the event, where whoever catches this cannot know it."""
        super().__init__(message)
        self.event_id = event_id
        self.code = code
        self.message = message
        self.param = param
        self.type = type


# What clients send


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Tool(_Strict, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolChoiceFunction(_Strict, kw_only=True):
    type: Literal["function"]
    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | ToolChoiceFunction


class SharedConfig(_Strict, kw_only=True):
    """What a session and a single response can be told alike. ``None``: not said."""

    output_modalities: Modalities | None = None
    instructions: str | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = None
    audio: Anything = None
    prompt: Anything = None
    reasoning: Anything = None


class SessionConfig(SharedConfig, kw_only=True):
    type: str
    model: str | None = None
    id: str | None = None
    object: Literal["realtime.session"] | None = None
    include: tuple[str, ...] | None = None
    tracing: Anything = None
    truncation: Anything = None


class ContentConfig(_Strict, kw_only=True):
    type: str
    text: str | None = None
    audio: Anything = None
    transcript: Anything = None
    image_url: Anything = None
    detail: Anything = None


class ItemConfig(_Strict, kw_only=True):
    """Any kind of item; ``realtime_items`` knows which fields belong to which."""

    type: str
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    role: str | None = None
    content: Annotated[tuple[ContentConfig, ...], Meta(max_length=64)] | None = None
    name: Id | None = None
    call_id: Id | None = None
    arguments: str | None = None
    output: str | None = None


class ResponseConfig(SharedConfig, kw_only=True):
    conversation: str | None = None
    input: Annotated[tuple[ItemConfig, ...], Meta(max_length=1024)] | None = None
    metadata: Metadata | None = None


class ClientEvent(_Strict, kw_only=True):
    type: str
    event_id: Annotated[str, Meta(max_length=MAX_EVENT_ID)] | None = None


class SessionUpdate(ClientEvent, kw_only=True):
    session: SessionConfig


class ItemCreate(ClientEvent, kw_only=True):
    item: ItemConfig
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent, kw_only=True):
    item_id: str


class ItemDelete(ClientEvent, kw_only=True):
    item_id: str


class ResponseCreate(ClientEvent, kw_only=True):
    response: ResponseConfig | None = None


class ResponseCancel(ClientEvent, kw_only=True):
    response_id: str | None = None


_DECODERS: Mapping[str, msgspec.json.Decoder[Any]] = MappingProxyType(
    {
        "session.update": msgspec.json.Decoder(SessionUpdate),
        "conversation.item.create": msgspec.json.Decoder(ItemCreate),
        "conversation.item.retrieve": msgspec.json.Decoder(ItemRetrieve),
        "conversation.item.delete": msgspec.json.Decoder(ItemDelete),
        "response.create": msgspec.json.Decoder(ResponseCreate),
        "response.cancel": msgspec.json.Decoder(ResponseCancel),
    }
)
AUDIO_EVENTS: Final = frozenset(
    (
        "input_audio_buffer.append",
        "input_audio_buffer.commit",
        "input_audio_buffer.clear",
        "output_audio_buffer.clear",
        "conversation.item.truncate",
    )
)
_UNSUPPORTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "audio": ("audio_not_supported", "Sessions carry text only here; leave out 'audio'."),
        "prompt": ("not_supported", "Stored prompts are not known here; send 'instructions'."),
        "reasoning": ("not_supported", "'reasoning' cannot be set for a session here."),
        "tracing": ("not_supported", "Traces of sessions are not kept here; leave out 'tracing'."),
        "include": ("not_supported", "There is nothing to include for text; leave out 'include'."),
        "truncation": (
            "not_supported",
            "Conversations are not truncated here; leave out 'truncation', and delete items that are too many.",
        ),
    }
)


class _Head(msgspec.Struct):
    type: object = None
    event_id: object = None


_head = msgspec.json.Decoder(_Head)
_PLACE = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


def decode_head(frame: str) -> tuple[str, str | None]:
    """Type and id of a client's event, for errors about the rest of it.

    Raises:
        RealtimeProblem: it is not a JSON object with a type.
    """
    try:
        head = _head.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RealtimeProblem("invalid_json", f"An event must be a JSON object: {_reason(error)}") from None
    event_id = head.event_id if isinstance(head.event_id, str) and len(head.event_id) <= MAX_EVENT_ID else None
    if not isinstance(head.type, str):
        raise RealtimeProblem("missing_type", "An event must have a 'type'.", param="type", event_id=event_id)
    return head.type, event_id


def decode_event(kind: str, frame: str) -> ClientEvent:
    """The whole event.

    Raises:
        RealtimeProblem: its type is not known, or it is not what its type asks for.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        if kind in AUDIO_EVENTS:
            raise RealtimeProblem(
                "audio_not_supported",
                f"{kind} is about audio, and sessions carry text only here; send conversation.item.create with "
                "content of type 'input_text'.",
                param="type",
            )
        known = ", ".join(_DECODERS)
        raise RealtimeProblem("unknown_event", f"There is no event {kind[:100]!r}; there are {known}.", param="type")
    try:
        event: ClientEvent = decoder.decode(frame)
    except msgspec.ValidationError as error:
        message, param = _place(str(error))
        raise RealtimeProblem("invalid_value", f"{kind}: {message}", param=param) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RealtimeProblem("invalid_json", f"An event must be a JSON object: {_reason(error)}") from None
    return event


def check_config(config: SharedConfig, where: str) -> None:
    """Refuse what is known but has no meaning for text. ``where``: ``session`` or ``response``.

    Raises:
        RealtimeProblem: with the field's name.
    """
    for name, (code, message) in _UNSUPPORTED.items():
        if getattr(config, name, None) not in (None, ()):
            raise RealtimeProblem(code, message, param=f"{where}.{name}")
    if config.output_modalities not in (None, ("text",)):
        raise RealtimeProblem(
            "audio_not_supported",
            "Sessions carry text only here; output_modalities must be ['text'].",
            param=f"{where}.output_modalities",
        )


def _place(message: str) -> tuple[str, str | None]:
    found = _PLACE.match(message)
    return (found[1][:500], found[2][:200] or None) if found else (message[:500], None)


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


# What the server sends


def encode(kind: str, event_id: str, fields: Mapping[str, object]) -> bytes:
    """One event, as JSON."""
    return msgspec.json.encode({"type": kind, "event_id": event_id, **fields})


def error_fields(problem: RealtimeProblem, event_id: str | None) -> dict[str, object]:
    """The fields of an ``error`` event. ``event_id``: that of the event it answers."""
    return {
        "error": {
            "type": problem.type,
            "code": problem.code,
            "message": problem.message,
            "param": problem.param,
            "event_id": event_id,
        }
    }
