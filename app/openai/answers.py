"""[P] Whether what a worker answered is an answer of its route at all, by its head and by how its body begins.

A success is a 200: an event stream where one was asked for, else a JSON document, or another type that the route has.
An error is a 4xx or 5xx, whatever its body. Everything else comes from a worker that is broken, or from somebody else
at its address, and is no client's business: the request can run elsewhere.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from app.openai.surface import RelayRoute

_EVENT_STREAM: Final = b"text/event-stream"
_END_OF_TYPE: Final = (b"", b";", b" ", b"\t")
_JSON: Final = b"application/json"
_JSON_BEGINS: Final = re.compile(rb"[ \t\r\n]*+[{\[]")
_NOT_BETWEEN_US: Final = 407
"""Of the errors: it is a proxy's word to whoever stands before it, and a client would take the gateway for one."""


class Form(Enum):
    """What is to come after a head."""

    EVENTS = "events"
    JSON = "JSON"
    OTHER = "other"
    """A document of a type that the route has beside JSON."""
    ERROR = "error"


class NoAnswer(ValueError):
    """It is none; the message says why: "it answered 302"."""


def check_coding(coding: bytes | None) -> None:
    """``coding``: the answer's ``content-encoding``. Workers are asked for none: the gateway looks into what they send.

    Raises:
        NoAnswer: it has one all the same.
    """
    if coding and coding.strip().lower() != b"identity":
        raise NoAnswer(f"it answered in the coding {coding[:100].decode('latin-1')!r}, though it was asked for none")


def form_of(status: int, content_type: bytes, route: RelayRoute, *, streaming: bool) -> Form:
    """``streaming``: the client asked for a stream. An event stream is taken for one without that, too: engines read
    the field ``stream`` less strictly than the gateway does.

    Raises:
        NoAnswer: no client can make anything of it.
    """
    if status == 200:
        if route.streams and _is_of(content_type, _EVENT_STREAM):
            return Form.EVENTS
        if not streaming and _is_of(content_type, _JSON):
            return Form.JSON
        return _unusual_form(content_type, route, streaming=streaming)
    if 400 <= status < 600 and status != _NOT_BETWEEN_US:
        return Form.ERROR
    raise NoAnswer(f"it answered {status}")


def _is_of(content_type: bytes, kind: bytes) -> bool:
    """Whether it is this type, as nearly all write it; parameters may follow."""
    return content_type.startswith(kind) and content_type[len(kind) : len(kind) + 1] in _END_OF_TYPE


def _unusual_form(content_type: bytes, route: RelayRoute, *, streaming: bool) -> Form:
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == _EVENT_STREAM and route.streams:
        return Form.EVENTS
    named = repr(kind[:100].decode("latin-1")) if kind else "no content type"
    if streaming:
        raise NoAnswer(f"it answered with {named} where a stream was asked for")
    if kind in (_JSON, b""):
        return Form.JSON
    if kind.startswith(route.other_types):
        return Form.OTHER
    raise NoAnswer(f"it answered with {named}, which {route.path} does not")


def check_beginning(form: Form, body: bytes) -> None:
    """Look at the whole of a held body, or at as much of it as is held.

    Raises:
        NoAnswer: it should be JSON and does not begin so.
    """
    if form is Form.JSON and body[:1] != b"{" and _JSON_BEGINS.match(body) is None:
        raise NoAnswer("it answered with a body that is not JSON" if body else "it answered without a body")
