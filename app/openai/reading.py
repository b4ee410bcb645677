"""[P] What routing needs of a request's body: the model, and whether a stream is asked for. Everything else is the
worker's to judge, and travels on byte for byte.

A reader is chosen by route. Most bodies are JSON; ``read_stateless_json`` also refuses what would only work with state
inside one engine; ``read_form`` looks at the fields of a form and skips over the file in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.http_headers import find
from app.openai.errors import Header, invalid_form, invalid_json, unsupported_media_type, unsupported_stateful

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

Reader = Callable[[bytes, Sequence[Header]], tuple[str, bool]]
"""Body and headers → model (empty if none is named) and whether a stream is asked for. Raises GatewayError."""

MAX_FORM_PARTS: Final = 128
MAX_FIELD_BYTES: Final = 1024
"""Of the two fields that are read."""
_FORM: Final = b"multipart/form-data"
_TRUE: Final = frozenset((b"true", b"1", b"on", b"yes", b"t", b"y"))


class _Routing(msgspec.Struct):
    model: object = None
    stream: object = None


class _Stateless(_Routing):
    previous_response_id: object = None
    conversation: object = None
    background: object = None


_routing = msgspec.json.Decoder(_Routing)
_stateless = msgspec.json.Decoder(_Stateless)


def read_json(body: bytes, headers: Sequence[Header] = ()) -> tuple[str, bool]:
    """The two fields of a JSON object; the rest is checked to be JSON.

    Raises:
        GatewayError: 400 ``invalid_json``.
    """
    return _model_and_stream(_decode(_routing, body))


def read_stateless_json(body: bytes, headers: Sequence[Header] = ()) -> tuple[str, bool]:
    """The same for ``/v1/responses``, which runs as ``store: false`` whatever it asks for: workers keep no answers.

    Raises:
        GatewayError: 400 ``invalid_json`` or ``unsupported_stateful``.
    """
    found: _Stateless = _decode(_stateless, body)
    if found.previous_response_id is not None:
        raise unsupported_stateful(
            "previous_response_id names an answer that was not kept; send the whole conversation as input",
            param="previous_response_id",
        )
    if found.conversation is not None:
        raise unsupported_stateful(
            "no conversations are kept here; send the whole conversation as input", param="conversation"
        )
    if found.background not in (None, False):
        raise unsupported_stateful(
            "an answer in the background could be fetched from nowhere; ask for it with stream: true",
            param="background",
        )
    return _model_and_stream(found)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        found = decoder.decode(body)
        if not body.isascii():
            body.decode("utf-8")
    except msgspec.ValidationError as error:
        raise invalid_json(str(error)) from None
    except UnicodeDecodeError as error:
        raise invalid_json(f"it is not UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise invalid_json(str(error) if body.strip() else "it is empty") from None
    except RecursionError:
        raise invalid_json("it is nested too deeply") from None
    return found


def _model_and_stream(found: _Routing) -> tuple[str, bool]:
    return found.model if isinstance(found.model, str) else "", found.stream is True


def read_form(body: bytes, headers: Sequence[Header]) -> tuple[str, bool]:
    """The fields ``model`` and ``stream`` of a form.

    Raises:
        GatewayError: 400 ``invalid_form``, or 415 for another content type.
    """
    given = find(headers, b"content-type") or b""
    kind, options = parse_options_header(given)
    boundary = options.get(b"boundary", b"")
    if kind != _FORM:
        raise unsupported_media_type(given.decode("latin-1"), accepted=_FORM.decode())
    if not boundary:
        raise invalid_form("its content type names no boundary")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise invalid_form(str(error)) from None
    if not form.ended:
        raise invalid_form("it ends before its last boundary")
    try:
        model = form.fields.get(b"model", b"").decode("utf-8")
    except UnicodeDecodeError:
        raise invalid_form("its model is not UTF-8") from None
    return model, form.fields.get(b"stream", b"").strip().lower() in _TRUE


class _Form:
    """Collects two fields as the parser passes them; nothing of a file is kept."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.ended = False
        self._parts = 0
        self._header = b""
        self._value = b""
        self._field: bytes | None = None

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FORM_PARTS:
            raise invalid_form(f"it has more than {MAX_FORM_PARTS} parts")
        self._field = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        header, value = self._header.lower(), self._value
        self._header = self._value = b""
        if header != b"content-disposition":
            return
        options = parse_options_header(value)[1]
        name = options.get(b"name", b"")
        if name not in (b"model", b"stream") or b"filename" in options:
            return
        if name in self.fields:  # which one would the worker take?
            raise invalid_form(f"it has the field {name.decode()} twice")
        self.fields[name] = b""
        self._field = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            return
        whole = self.fields[self._field] + data[start:end]
        if len(whole) > MAX_FIELD_BYTES:
            raise invalid_form(f"its field {self._field.decode()} is longer than {MAX_FIELD_BYTES} bytes")
        self.fields[self._field] = whole

    def _end(self) -> None:
        self.ended = True
