from __future__ import annotations

import pytest

from app.clients.request_head import check_fields, check_target
from app.openai.errors import GatewayError

HOST = (b"host", b"g:80")


@pytest.mark.parametrize("target", [b"/", b"/v1/x?y=%2f&z", b"//x", b"/x?", b'/a|b{c}^"<>`\\', b"/" + b"x" * 60_000])
def test_targets(target: bytes) -> None:
    check_target(b"GET", target)


@pytest.mark.parametrize("target", [b"", b"x", b"*", b"?x", b"/x#y", b"/x y", b"/\n", b"/x\n", b"/\xff", b"http://g/"])
def test_targets_that_are_none(target: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        check_target(b"GET", target)
    assert (caught.value.status, caught.value.code) == (400, "malformed_request")


def test_the_server_as_a_whole() -> None:
    check_target(b"OPTIONS", b"*")


@pytest.mark.parametrize(
    ("version", "fields", "expects"),
    [
        ("1.1", [HOST], False),
        ("1.1", [(b"host", b"")], False),
        ("1.1", [(b"host", b" [fe80::1%25eth0]:8000\t")], False),
        ("1.1", [HOST, (b"transfer-encoding", b" Chunked ")], False),
        ("1.1", [(b"expect", b"100-Continue"), HOST], True),
        ("1.0", [], False),
        ("1.0", [HOST], False),
        ("1.0", [(b"expect", b"100-continue")], False),
        ("1.0", [(b"expect", b"anything")], False),
    ],
)
def test_fields(version: str, fields: list[tuple[bytes, bytes]], expects: bool) -> None:
    assert check_fields(version, fields) is expects


@pytest.mark.parametrize(
    ("version", "fields", "status"),
    [
        ("0.9", [], 505),
        ("2.0", [HOST], 505),
        ("1.1", [], 400),
        ("1.1", [HOST, HOST], 400),
        ("1.0", [HOST, HOST], 400),
        ("1.1", [(b"host", b"a b")], 400),
        ("1.1", [(b"host", b"a/b")], 400),
        ("1.1", [(b"host", b"a@b")], 400),
        ("1.1", [(b"host", b"a,b")], 400),
        ("1.1", [(b"host", b"\xe9")], 400),
        ("1.0", [(b"transfer-encoding", b"chunked")], 400),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], 501),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked, chunked")], 501),
        ("1.1", [HOST, (b"transfer-encoding", b"")], 501),
        ("1.1", [HOST, (b"expect", b"")], 417),
        ("1.1", [HOST, (b"expect", b"100-continue, x")], 417),
        ("1.1", [HOST, (b"expect", b"100-continue"), (b"expect", b"x")], 417),
    ],
)
def test_fields_that_are_refused(version: str, fields: list[tuple[bytes, bytes]], status: int) -> None:
    with pytest.raises(GatewayError) as caught:
        check_fields(version, fields)
    assert caught.value.status == status
    assert (b"connection", b"close") in caught.value.headers
