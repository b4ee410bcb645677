"""The relayed routes, and how a stream of each one ends. Pure.

A stream that stops without its route's end marker was cut. Markers are looked for cheaply first, as bytes, and then
exactly, in the event's fields, because a model may write the marker's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from app.openai.reading import Reader, read_form, read_json, read_stateless_json
from app.openai.sse import fields, split_events


class _Typed(msgspec.Struct):
    type: str = ""


_typed = msgspec.json.Decoder(_Typed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRoute:
    """One relayed route. ``name`` is its label in metrics and logs."""

    path: str
    name: str
    read: Reader = read_json
    streams: bool = False
    end_data: bytes = b""
    """Data of the event that ends a stream."""
    end_types: tuple[bytes, ...] = ()
    """Or: names of events that do, also accepted as the ``type`` within their data."""
    resumable: bool = False
    """Whether workers write notes for it, from which another one can go on."""
    named_errors: bool = False
    """Whether an error event carries ``event: error``."""
    other_types: tuple[bytes, ...] = ()
    """How the content types begin, in lower case, that a whole answer may have beside JSON."""

    def ends_in(self, events: bytes) -> bool:
        """Whether whole events contain this route's end marker."""
        if self.end_data:
            return self.end_data in events and any(fields(e)[1] == self.end_data for e in split_events(events))
        if not any(marker in events for marker in self.end_types):
            return False
        return any(self._is_end(*fields(event)) for event in split_events(events))

    def _is_end(self, name: bytes, data: bytes) -> bool:
        if name:
            return name in self.end_types
        try:
            return _typed.decode(data).type.encode() in self.end_types
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return False


def _json(*paths: str, name: str, other_types: tuple[bytes, ...] = ()) -> tuple[RelayRoute, ...]:
    """Routes that are answered whole. Some have several paths: with and without the version, or older ones."""
    return tuple(RelayRoute(path=path, name=name, other_types=other_types) for path in paths)


def _audio(path: str, *, name: str) -> RelayRoute:
    return RelayRoute(path=path, name=name, read=read_form, streams=True, end_data=b"[DONE]", other_types=_TRANSCRIPTS)


_TRANSCRIPTS = (b"text/plain", b"text/vtt", b"text/srt", b"application/x-subrip", b"audio/")
"""``response_format`` ``text``, ``vtt`` and ``srt``; there is no one type for the last."""
_VECTORS = (b"application/octet-stream",)
"""``encoding_format`` ``bytes`` and ``bytes_only``."""


_ALL = (
    RelayRoute(path="/v1/chat/completions", name="chat", streams=True, resumable=True, end_data=b"[DONE]"),
    RelayRoute(path="/v1/completions", name="completions", streams=True, resumable=True, end_data=b"[DONE]"),
    RelayRoute(
        path="/v1/responses",
        name="responses",
        read=read_stateless_json,
        streams=True,
        resumable=True,
        end_types=(b"response.completed", b"response.incomplete", b"response.failed"),
        named_errors=True,
    ),
    RelayRoute(
        path="/v1/messages",
        name="messages",
        streams=True,
        resumable=True,
        end_types=(b"message_stop",),
        named_errors=True,
    ),
    *_json("/v1/messages/count_tokens", name="count_tokens"),
    *_json("/v1/embeddings", name="embeddings", other_types=_VECTORS),
    *_json("/v1/rerank", "/v2/rerank", "/rerank", name="rerank"),
    *_json("/v1/score", "/score", name="score"),
    *_json("/classify", name="classify"),
    *_json("/pooling", name="pooling", other_types=_VECTORS),
    *_json("/tokenize", name="tokenize"),
    *_json("/detokenize", name="detokenize"),
    _audio("/v1/audio/transcriptions", name="transcriptions"),
    _audio("/v1/audio/translations", name="translations"),
)
RELAY_ROUTES: Mapping[str, RelayRoute] = MappingProxyType({route.path: route for route in _ALL})
