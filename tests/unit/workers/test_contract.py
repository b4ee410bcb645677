"""The watch line travels and survives what a newer or a broken worker sends."""

from __future__ import annotations

import msgspec
import pytest

from workers.contract import Role, WatchLine, decode_watch_line, encode_watch_line

LINE = WatchLine(
    worker="pod-0",
    instance="5f0c",
    epoch=7,
    engine="a",
    state=Role.ACTIVE,
    models=("smollm2",),
    inflight=3,
    capacity=64,
    steps=48211,
    seq=812,
    standby=Role.STANDBY,
    kv_usage=0.41,
    max_model_len=2048,
)


def test_round_trip() -> None:
    raw = encode_watch_line(LINE)
    assert raw.endswith(b"}\n")
    assert raw.count(b"\n") == 1
    assert decode_watch_line(raw) == decode_watch_line(raw[:-1]) == LINE


def test_unknown_fields_of_a_newer_worker_are_ignored() -> None:
    document = msgspec.json.decode(encode_watch_line(LINE)) | {"new": [1, 2]}
    assert decode_watch_line(msgspec.json.encode(document)) == LINE


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"{}",
        b"[]",
        b"null",
        b'{"worker":"pod-0"}',
        encode_watch_line(LINE).replace(b"ACTIVE", b"ASLEEP"),
        encode_watch_line(LINE).replace(b"7", b'"7"', 1),
        encode_watch_line(LINE)[:-5],
        b"\xff\xfe",
    ],
)
def test_what_is_no_watch_line_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_watch_line(raw)
