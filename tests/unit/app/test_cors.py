from __future__ import annotations

import pytest

from app.clients.cors import EXPOSED, Cors
from app.openai.errors import Header

ORIGIN = b"https://a.example"
ASKED: list[Header] = [(b"origin", ORIGIN), (b"access-control-request-method", b"POST")]


def cors(*origins: str, headers: tuple[str, ...] = ("*",)) -> Cors:
    return Cors(origins=origins, methods=("GET", "POST"), headers=headers, max_age_seconds=60)


@pytest.mark.parametrize("listed", ["https://a.example", "HTTPS://A.example/"])
def test_an_origin_that_may(listed: str) -> None:
    assert cors("http://b", listed).answer([(b"origin", ORIGIN)]) == [
        (b"vary", b"Origin"),
        (b"access-control-allow-origin", ORIGIN),
        (b"access-control-expose-headers", EXPOSED),
    ]


@pytest.mark.parametrize(
    "origin", [b"http://a.example", b"https://a.example:8443", b"https://a.example.evil", b"null", b"", b"\xff"]
)
def test_an_origin_that_may_not(origin: bytes) -> None:
    assert cors("https://a.example").answer([(b"origin", origin)]) == [(b"vary", b"Origin")]
    assert cors("https://a.example").preflight([(b"origin", origin), ASKED[1]]) == []


def test_who_is_no_page_learns_nothing() -> None:
    assert cors("https://a.example").answer([]) == [(b"vary", b"Origin")]
    assert cors("*").answer([]) == []
    assert cors("https://a.example").lines([]) == b"vary: Origin\r\n"


def test_all_origins() -> None:
    assert cors("*").answer([(b"origin", b"null")])[0] == (b"access-control-allow-origin", b"*")


def test_a_preflight() -> None:
    said = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"60")]
    assert cors("*").preflight(ASKED) == said
    wanted = [*ASKED, (b"access-control-request-headers", b"authorization")]
    assert cors("*").preflight(wanted) == [*said, (b"access-control-allow-headers", b"authorization")]
    assert cors("*", headers=("x-a", "x-b")).preflight(wanted) == [
        *said,
        (b"access-control-allow-headers", b"x-a, x-b"),
    ]
    assert cors("*").preflight([(b"origin", ORIGIN)]) == []
