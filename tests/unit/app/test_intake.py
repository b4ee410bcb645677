from __future__ import annotations

import pytest

from app.intake.arrival import check_headers
from app.intake.request_ids import RequestIds
from app.openai.errors import GatewayError


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
        ([(b"content-encoding", b"gzip")], None),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"br")], 415),
        ([(b"content-encoding", b"identity, gzip")], 415),
        ([(b"content-encoding", b"gzip"), (b"content-encoding", b"gzip")], 415),
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
