"""Each decoder whole, in steps, with what follows, cut off, damaged and oversize."""

from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from app.intake.content_coding import CODINGS, MAX_PARTS, Decoding, coding_of, without_coding
from app.openai.errors import GatewayError

LIMIT = 1 << 20
MADE: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "deflate": zlib.compress,
}


def decode(coding: str, coded: bytes, *, limit: int = LIMIT, step: int = 1 << 40) -> bytes:
    decoding = Decoding(coding, coded, limit)
    for _ in range(1_000_000):
        if decoding.run(step):
            return decoding.body
    raise AssertionError("it never ends")


def refusal(coding: str, coded: bytes, *, limit: int = LIMIT, step: int = 1 << 40) -> tuple[int, str]:
    with pytest.raises(GatewayError) as caught:
        decode(coding, coded, limit=limit, step=step)
    return caught.value.status, caught.value.code


def test_every_coding_is_tested() -> None:
    assert set(MADE) == set(CODINGS)


@pytest.mark.parametrize("step", [1, 100_000, 1 << 40])
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [0, 1, 65_536, 300_000])
@pytest.mark.parametrize("kind", ["zeroes", "noise"])
def test_whole(coding: str, size: int, kind: str, step: int) -> None:
    body = bytes(size) if kind == "zeroes" else random.Random(size).randbytes(size)
    assert decode(coding, MADE[coding](body), step=step) == body


@given(st.binary(max_size=2000), st.sampled_from(CODINGS), st.integers(1, 5000))
def test_whole_or_in_steps(body: bytes, coding: str, step: int) -> None:
    assert decode(coding, MADE[coding](body), step=step) == body


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_several_parts_are_one_body(coding: str) -> None:
    make = MADE[coding]
    assert decode(coding, make(b"a" * 100_000) + make(b"") + make(b"b")) == b"a" * 100_000 + b"b"


def test_a_zstd_frame_to_be_skipped() -> None:
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"junk"
    assert decode("zstd", skipped + zstd.compress(b"x") + skipped) == b"x"


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("kind", ["empty", "cut", "cut at its end", "followed", "other", "damaged"])
def test_what_is_no_such_body(coding: str, kind: str) -> None:
    noise = random.Random(1).randbytes(200_000)
    coded = MADE[coding](noise)
    middle = len(coded) // 2
    broken = {
        "empty": b"",
        "cut": coded[:middle],
        "cut at its end": coded[:-1],
        "followed": coded + b"junk",
        "other": b'{"model":"m"}',
        "damaged": coded[:20] + bytes([coded[20] ^ 0xFF, coded[21] ^ 0xFF]) + coded[22:],
    }[kind]
    if (coding, kind) == ("zstd", "damaged"):  # without a checksum, raw blocks are whatever they are
        broken = coded[:5] + b"\xff" * 8 + coded[13:]
    assert refusal(coding, broken) == (400, "invalid_content_encoding")


@given(st.binary(max_size=300), st.sampled_from(CODINGS))
def test_any_bytes_are_a_body_or_an_error(coded: bytes, coding: str) -> None:
    with contextlib.suppress(GatewayError):
        decode(coding, coded)


@pytest.mark.parametrize("coding", CODINGS)
def test_the_limit_is_that_of_the_decoded_body(coding: str) -> None:
    assert len(decode(coding, MADE[coding](bytes(LIMIT)))) == LIMIT
    assert refusal(coding, MADE[coding](bytes(LIMIT + 1))) == (413, "body_too_large")


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_takes_no_more_than_the_limit(coding: str) -> None:
    bomb = MADE[coding](bytes(200 << 20))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        assert refusal(coding, bomb) == (413, "body_too_large")
        assert tracemalloc.get_traced_memory()[1] < 3 * LIMIT
    finally:
        tracemalloc.stop()


def test_a_zstd_window_that_is_too_large() -> None:
    options = {zstd.CompressionParameter.window_log: 24, zstd.CompressionParameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    wide = compressor.compress(random.Random(1).randbytes(1000)) + compressor.flush()
    assert refusal("zstd", wide) == (400, "invalid_content_encoding")


def test_a_body_of_nothing_goes_in_steps_too() -> None:
    """Parts that stand for nothing: each step ends."""
    decoding = Decoding("gzip", gzip.compress(b"") * MAX_PARTS, LIMIT)
    steps = 1
    while not decoding.run(100_000):
        steps += 1
    assert (decoding.body, steps > 2) == (b"", True)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_parts_are_limited(coding: str) -> None:
    make = MADE[coding]
    assert decode(coding, make(b"") * (MAX_PARTS - 1) + make(b"x")) == b"x"
    assert refusal(coding, make(b"") * MAX_PARTS + make(b"x")) == (400, "invalid_content_encoding")


def test_frames_to_be_skipped_count() -> None:
    skipped = b"\x50\x2a\x4d\x18" + bytes(4)
    assert refusal("zstd", skipped * MAX_PARTS + zstd.compress(b"x")) == (400, "invalid_content_encoding")


@pytest.mark.parametrize("coding", CODINGS)
def test_one_that_is_stopped_goes_one_piece_further(coding: str) -> None:
    decoding = Decoding(coding, MADE[coding](bytes(LIMIT)), LIMIT)
    decoding.stop()
    assert not decoding.run(1 << 40)
    assert len(decoding.body) <= 64 * 1024


@pytest.mark.parametrize(
    ("value", "coding"),
    [
        (b"", ""),
        (b" Identity ", ""),
        (b"GZip", "gzip"),
        (b"x-gzip", "gzip"),
        (b"zstd", "zstd"),
        (b"deflate", "deflate"),
    ],
)
def test_names(value: bytes, coding: str) -> None:
    assert coding_of(value) == coding


@pytest.mark.parametrize("value", [b"br", b"gzip, gzip", b"gzip,", b"gzip;q=1", b"\xff", b"compress"])
def test_names_that_are_refused(value: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        coding_of(value)
    assert caught.value.status == 415
    assert caught.value.headers == ((b"accept-encoding", b"gzip, zstd, deflate"),)


def test_what_was_said_about_the_coded_body_is_dropped() -> None:
    kept = (b"content-type", b"application/json")
    assert without_coding([(b"content-encoding", b"gzip"), kept, (b"content-digest", b"x")]) == [kept]
