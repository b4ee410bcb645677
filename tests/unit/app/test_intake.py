from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.intake import RequestIds, check_headers, read_routing
from app.openai.errors import GatewayError


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
    assert read_routing(body) == expected


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
        read_routing(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


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
    assert read_routing(body) == (model, stream)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], None),
        ([(b"content-length", b"100")], None),
        ([(b"content-length", b"101")], 413),
        ([(b"content-length", b" 000000000000000000000099 ")], None),
        ([(b"content-length", b" 101 ")], 413),
        ([(b"content-length", b"9" * 5000)], 413),
        ([(b"content-encoding", b"identity")], None),
        ([(b"content-encoding", b"Identity"), (b"content-encoding", b"")], None),
        ([(b"content-encoding", b"gzip")], 400),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"br")], 400),
        ([(b"content-encoding", b"identity, gzip")], 400),
        ([(b"content-type", b"application/json; charset=utf-8")], None),
        ([(b"content-type", b"application/vnd.hotspare.resume")], 415),
        ([(b"content-type", b"Application/VND.hotspare.Resume; x=1")], 415),
        ([(b"content-type", b"application/json"), (b"content-type", b"application/vnd.hotspare.resume")], 415),
        ([(b"content-type", b"application/json, application/vnd.hotspare.resume")], 415),
    ],
)
def test_headers(headers: list[tuple[bytes, bytes]], status: int | None) -> None:
    if status is None:
        check_headers(headers, 100)
        return
    with pytest.raises(GatewayError) as caught:
        check_headers(headers, 100)
    assert caught.value.status == status


def test_ids_are_unique() -> None:
    one, other = RequestIds(), RequestIds()
    assert len({one.new(), one.new(), other.new(), other.new()}) == 4
