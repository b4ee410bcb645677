from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.relay.headers import client_request_id, downstream_headers, stream_headers, upstream_headers


def upstream(*headers: tuple[bytes, bytes]) -> list[bytes]:
    lines = upstream_headers(list(headers), length=3, client_id=b"c-1", gateway_id=b"g-1", notes=False)
    assert lines.endswith(b"\r\n")
    return lines[:-2].split(b"\r\n")


OWN = [b"accept-encoding: identity", b"content-length: 3", b"x-request-id: c-1", b"x-hotspare-request-id: g-1"]


def test_end_to_end_headers_pass() -> None:
    assert upstream((b"content-type", b"application/json"), (b"traceparent", b"00-1")) == [
        b"content-type: application/json",
        b"traceparent: 00-1",
        *OWN,
    ]


@pytest.mark.parametrize(
    "name",
    [
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"te",
        b"upgrade",
        b"expect",
        b"accept-encoding",
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"cookie",
        b"proxy-authorization",
        b"x-request-id",
        b"x-hotspare-request-id",
        b"x-hotspare-stream",
        b"x-hotspare-worker-token",
    ],
)
def test_what_does_not_reach_a_worker(name: bytes) -> None:
    assert upstream((name, b"value")) == OWN


def test_headers_named_by_connection_are_hop_by_hop() -> None:
    assert upstream((b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"x-kept", b"2")) == [
        b"x-kept: 2",
        *OWN,
    ]


@pytest.mark.parametrize(
    ("given_id", "expected"),
    [
        (b"abc-1_2.3:4", True),
        (b"a" * 128, True),
        (b"a" * 129, False),
        (b"", False),
        (b"a b", False),
        (b'a"b', False),
        (b"a\tb", False),
        (b"\xc3\xa9", False),
        (b"a\n", False),
    ],
)
def test_request_ids(given_id: bytes, expected: bool) -> None:
    assert client_request_id([(b"x-request-id", given_id)]) == (given_id if expected else None)


@given(st.binary())
def test_no_id_breaks_a_header(given_id: bytes) -> None:
    accepted = client_request_id([(b"x-request-id", given_id)])
    assert accepted is None or (accepted.isascii() and accepted.decode().isprintable() and b" " not in accepted)


def test_down() -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"keep-alive"),
        (b"date", b"now"),
        (b"server", b"uvicorn"),
        (b"x-hotspare-reselect", b"1"),
        (b"x-request-id", b"theirs"),
        (b"retry-after", b"3"),
    ]
    assert downstream_headers(headers, request_id=b"ours") == [
        (b"content-type", b"application/json"),
        (b"retry-after", b"3"),
        (b"x-request-id", b"ours"),
    ]


def test_a_stream_is_neither_cached_nor_buffered() -> None:
    headers = dict(
        stream_headers([(b"cache-control", b"public"), (b"content-type", b"text/event-stream")], request_id=b"r")
    )
    assert headers == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-request-id": b"r",
    }
    assert dict(stream_headers([], request_id=b"r"))[b"content-type"].startswith(b"text/event-stream")


def test_token_notes_are_asked_for_where_a_stream_is() -> None:
    lines = upstream_headers([], length=0, client_id=b"c", gateway_id=b"g", notes=True)
    assert lines.endswith(b"x-hotspare-stream: 1\r\n")


def test_a_workers_cookies_are_not_passed_on() -> None:
    kept = downstream_headers([(b"set-cookie", b"a=b"), (b"x-kept", b"1")], request_id=b"r")
    assert kept == [(b"x-kept", b"1"), (b"x-request-id", b"r")]


def test_a_resume_has_a_content_type_of_its_own() -> None:
    headers = [(b"content-type", b"application/json"), (b"accept", b"*/*"), (b"x-content-type", b"x")]
    lines = upstream_headers(
        headers, length=9, client_id=b"c", gateway_id=b"g", notes=True, content_type=b"application/vnd.hotspare.resume"
    )
    assert lines.count(b"content-type: ") == 2
    assert b"\r\ncontent-type: application/vnd.hotspare.resume\r\n" in lines
    assert b"application/json" not in lines
    assert b"accept: */*\r\n" in lines
