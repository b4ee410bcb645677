"""Readers of bodies: what routing looks at, and nothing else."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.errors import GatewayError
from app.openai.reading import MAX_FIELD_BYTES, MAX_FORM_PARTS, read_form, read_json, read_stateless_json


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", ("", False)),
        (b'{"model":"m"}', ("m", False)),
        (b'{"model":"m","stream":true}', ("m", True)),
        (b'{"stream":false,"model":"m","unknown":{"a":[1,2]}}', ("m", False)),
        (b'{"model":7,"stream":"yes"}', ("", False)),
        (b'{"model":null,"stream":1}', ("", False)),
        ('{"model":"é"}'.encode(), ("é", False)),
    ],
)
def test_what_routing_reads(body: bytes, expected: tuple[str, bool]) -> None:
    assert read_json(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"model":"m"',
        b'{"model":"m"} x',
        b'{"model":"m",}',
        b'{"x":NaN}',
        b'{"model":"m","x":"\xff"}',
        b"[" * 200_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(12),
)
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        read_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_so(body: bytes) -> None:
    with pytest.raises(GatewayError, match="it is empty"):
        read_json(body)


TEXT = st.text(max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, JSON, max_size=4), TEXT, st.booleans())
def test_any_object(document: dict[str, object], model: str, stream: bool) -> None:
    body = json.dumps(document | {"model": model, "stream": stream}, ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return
    assert read_json(body) == (model, stream)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"background": True, "store": False}, "background"),
    ],
)
def test_state_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read_stateless_json(json.dumps({"model": "m", "input": "x"} | fields).encode())
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_stateful", param)
    assert caught.value.message.startswith("Workers keep no state between requests: ")


@pytest.mark.parametrize(
    "fields", [{}, {"store": True}, {"store": False}, {"background": False, "conversation": None}, {"background": None}]
)
def test_what_needs_no_state_passes(fields: dict[str, object]) -> None:
    body = json.dumps({"model": "m", "stream": True, "previous_response_id": None} | fields).encode()
    assert read_stateless_json(body) == ("m", True)


def test_stateless_bodies_are_json() -> None:
    with pytest.raises(GatewayError) as caught:
        read_stateless_json(b'{"background":')
    assert caught.value.code == "invalid_json"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes, end: bytes = b"--B--\r\n", content_type: bytes = b"multipart/form-data; boundary=B") -> object:
    return read_form(b"".join(parts) + end, [(b"content-type", content_type)])


FILE = part("file", b"RIFF\x00\xff\r\n--\r\n--b\r\n", '; filename="a.wav"\r\nContent-Type: audio/wav')


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((FILE,), ("", False)),
        ((FILE, part("model", b"m")), ("m", False)),
        ((part("model", b"m"), FILE, part("stream", b"true")), ("m", True)),
        ((part("stream", b" True\r\n"), part("model", "é".encode()), FILE), ("é", True)),
        ((part("stream", b"false"), part("language", b"en"), part("model", b"")), ("", False)),
        ((part("model", b"a file", '; filename="model"'), part("model", b"m")), ("m", False)),
    ],
    ids=range(6),
)
def test_what_routing_reads_of_a_form(parts: tuple[bytes, ...], expected: tuple[str, bool]) -> None:
    assert form(*parts) == expected


def test_other_ways_to_write_the_same_form() -> None:
    assert form(part("model", b"m"), content_type=b'Multipart/Form-Data; charset=utf-8; boundary="B"') == ("m", False)
    shouted = b"--B\r\nCONTENT-DISPOSITION: form-data; name=model\r\n\r\nm\r\n"
    assert form(shouted) == ("m", False)
    assert form(part("model", b"m"), end=b"--B--") == ("m", False)


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"{}", b"application/json", 415, "unsupported_media_type"),
        (b"model=m", b"application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"{}", b"", 415, "unsupported_media_type"),
        (FILE, b"multipart/form-data", 400, "invalid_form"),
        (b"", b"multipart/form-data; boundary=B", 400, "invalid_form"),
        (FILE, b"multipart/form-data; boundary=B", 400, "invalid_form"),
        (FILE + b"--B--", b"multipart/form-data; boundary=C", 400, "invalid_form"),
        (b"nonsense", b"multipart/form-data; boundary=B", 400, "invalid_form"),
        (part("model", b"m") * 2 + b"--B--", b"multipart/form-data; boundary=B", 400, "invalid_form"),
        (part("model", b"\xff") + b"--B--", b"multipart/form-data; boundary=B", 400, "invalid_form"),
        (
            part("model", b"m" * (MAX_FIELD_BYTES + 1)) + b"--B--",
            b"multipart/form-data; boundary=B",
            400,
            "invalid_form",
        ),
        (part("x", b"") * (MAX_FORM_PARTS + 1) + b"--B--", b"multipart/form-data; boundary=B", 400, "invalid_form"),
    ],
    ids=range(12),
)
def test_forms_that_are_refused(body: bytes, content_type: bytes, status: int, code: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read_form(body, [(b"content-type", content_type)])
    assert (caught.value.status, caught.value.code) == (status, code)


@given(
    st.binary(max_size=300), st.sampled_from([b"multipart/form-data; boundary=B", b"multipart/form-data; boundary="])
)
def test_any_bytes_are_a_form_or_refused(body: bytes, content_type: bytes) -> None:
    for given_body in (body, part("model", body) + body + b"--B--", b"--B\r\n" + body):
        with contextlib.suppress(GatewayError):  # anything else that is raised fails the test
            read_form(given_body, [(b"content-type", content_type)])


@given(st.binary(max_size=200))
def test_a_file_hides_nothing_and_adds_nothing(content: bytes) -> None:
    if b"\r\n--B" not in b"\r\n" + content:
        assert form(part("file", content, '; filename="f"'), part("model", b"m")) == ("m", False)
