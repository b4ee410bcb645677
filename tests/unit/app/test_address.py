from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.address import Address, parse_address, parse_addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8100", "127.0.0.1", 8100),
        (" pod-0:8100 ", "pod-0", 8100),
        ("http://pod-0.pods:8100", "pod-0.pods", 8100),
        ("http://pod-0:8100/", "pod-0", 8100),
        ("[::1]:8100", "::1", 8100),
    ],
)
def test_good(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert parse_address(str(parse_address(text))) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pod-0", "port is missing"),
        ("pod-0:", "port is missing"),
        ("pod-0:0", "port is missing"),
        ("pod-0:http", "host:port"),
        ("pod-0:70000", "range"),
        (":8100", "host:port"),
        ("https://pod-0:8100", "plain http"),
        ("ftp://pod-0:8100", "host:port"),
        ("http://pod-0:8100/v1", "without a path"),
        ("http://pod-0:8100?x", "without a path"),
        ("http://me@pod-0:8100", "host:port"),
        ("pod 0:8100", "host:port"),
    ],
)
def test_bad(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


def test_lists() -> None:
    assert parse_addresses("a:1, http://b:2,,a:1") == (Address("a", 1), Address("b", 2))
    for empty in ("", " , "):
        with pytest.raises(ValueError, match="empty"):
            parse_addresses(empty)


@given(st.text(max_size=40))
def test_anything_is_an_address_or_a_sentence(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError as error:
        sentence = str(error)
    else:
        sentence = "host:port"
        assert 1 <= address.port <= 65535
    assert "host:port" in sentence
