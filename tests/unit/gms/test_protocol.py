from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms import protocol
from gms.protocol import HEADER_BYTES, MAX_FRAME, ErrorCode, FrameDecoder, GmsError, LeaseMode

HELLO = protocol.Hello(version=1, client="engine", engine="a", instance="i", device="cpu:0", fds=1)
REQUESTS: list[protocol.Request] = [
    HELLO,
    protocol.Attach(pool="weights/0a1b", mode=LeaseMode.RW_OR_RO),
    protocol.Allocate(pool="kv", tag="pages", size_bytes=4096),
    protocol.Export(pool="kv_index", tag="index"),
    protocol.Commit(pool="weights/0a1b", manifest=b"\x00m"),
    protocol.Release(pool="kv", quiesced=True),
    protocol.GetStatus(),
]
REPLIES: list[protocol.Reply] = [
    protocol.Welcome(version=1, device="cpu:0"),
    protocol.Granted(
        mode=LeaseMode.RO,
        generation=3,
        fresh=False,
        manifest=b"m",
        allocations=[protocol.AllocationInfo("w", 4096)],
    ),
    protocol.Pages(tag="w", size_bytes=4096, created=True, fds=1),
    protocol.Done(),
    protocol.Failure(code=ErrorCode.TIMEOUT, message="Too late.", retryable=True),
]


def frames(decoder: FrameDecoder) -> list[bytes]:
    taken = []
    while (frame := decoder.next_frame()) is not None:
        taken.append(frame)
    return taken


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_a_request_survives_its_journey(message: protocol.Request) -> None:
    encoded = protocol.encode(message)
    assert int.from_bytes(encoded[:HEADER_BYTES], "little") == len(encoded) - HEADER_BYTES
    assert protocol.decode_request(encoded[HEADER_BYTES:]) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_a_reply_survives_its_journey(message: protocol.Reply) -> None:
    assert protocol.decode_reply(protocol.encode(message)[HEADER_BYTES:]) == message


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_whole_bytewise_and_trailing(message: protocol.Request) -> None:
    encoded = protocol.encode(message)
    whole = FrameDecoder()
    whole.feed(encoded)
    assert frames(whole) == [encoded[HEADER_BYTES:]]
    assert whole.buffered == 0

    bytewise = FrameDecoder()
    for index in range(len(encoded)):
        assert bytewise.next_frame() is None
        bytewise.feed(encoded[index : index + 1])
    assert frames(bytewise) == [encoded[HEADER_BYTES:]]

    trailing = FrameDecoder()
    trailing.feed(encoded + encoded[:7])
    assert frames(trailing) == [encoded[HEADER_BYTES:]]
    assert trailing.buffered == 7
    trailing.feed(encoded[7:])
    assert frames(trailing) == [encoded[HEADER_BYTES:]]


def test_oversize_is_refused_at_its_header_and_for_good() -> None:
    decoder = FrameDecoder(max_frame=16)
    decoder.feed((16).to_bytes(4, "little") + bytes(16) + (17).to_bytes(4, "little"))
    assert decoder.next_frame() == bytes(16)
    for _ in range(2):
        with pytest.raises(GmsError, match="17 bytes") as caught:
            decoder.next_frame()
        assert caught.value.code == ErrorCode.BAD_MESSAGE


def test_an_empty_frame_is_a_frame_but_no_message() -> None:
    decoder = FrameDecoder()
    decoder.feed(bytes(4))
    assert decoder.next_frame() == b""
    with pytest.raises(GmsError) as caught:
        protocol.decode_request(b"")
    assert caught.value.code == ErrorCode.BAD_MESSAGE


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, taken = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        taken += frames(decoder)
    assert taken == bodies


@given(st.binary(max_size=200))
def test_random_bytes_are_an_error_with_a_sentence_or_a_message(data: bytes) -> None:
    for decode in (protocol.decode_request, protocol.decode_reply):
        code = ""
        try:
            decode(data)
        except GmsError as error:
            code = error.code
        assert code in ("", ErrorCode.BAD_MESSAGE, ErrorCode.INVALID)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Attach", "pool": "weights/", "mode": "rw"},
        {"type": "Attach", "pool": "weights/a/b", "mode": "rw"},
        {"type": "Attach", "pool": "weights/a\n", "mode": "rw"},
        {"type": "Attach", "pool": "other", "mode": "rw"},
        {"type": "Attach", "pool": "kv", "mode": "write"},
        {"type": "Attach", "pool": "kv", "mode": "rw", "epoch": -1},
        {"type": "Attach", "pool": "kv", "mode": "rw", "epoch": 1 << 62},
        {"type": "Attach", "pool": "kv", "mode": "rw", "timeout_seconds": -1.0},
        {"type": "Attach", "pool": "kv", "mode": "rw", "timeout_seconds": float("nan")},
        {"type": "Attach", "pool": "kv", "mode": "rw", "timeout_seconds": float("inf")},
        {"type": "Allocate", "pool": "kv", "tag": "", "size_bytes": 1},
        {"type": "Allocate", "pool": "kv", "tag": "t" * 129, "size_bytes": 1},
        {"type": "Allocate", "pool": "kv", "tag": "a\x00b", "size_bytes": 1},
        {"type": "Allocate", "pool": "kv", "tag": "t", "size_bytes": 0},
        {"type": "Allocate", "pool": "kv", "tag": "t", "size_bytes": (1 << 48) + 1},
        {"type": "Allocate", "pool": "kv", "tag": "t", "size_bytes": 1, "fds": 17},
        {"type": "Hello", "version": 1, "client": "e", "engine": "a" * 129, "instance": "i", "device": "d"},
        {"type": "Nonsense"},
    ],
    ids=str,
)
def test_out_of_bounds_is_invalid(message: dict[str, object]) -> None:
    with pytest.raises(GmsError) as caught:
        protocol.decode_request(msgspec.msgpack.encode(message))
    assert caught.value.code == ErrorCode.INVALID
    assert not caught.value.retryable


def test_a_message_larger_than_a_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(GmsError, match="does not fit"):
        protocol.encode(protocol.Commit(pool="weights/a", manifest=bytes(MAX_FRAME)))


def test_the_fullest_replies_fit_into_a_frame() -> None:
    from gms.allocations import MAX_ALLOCATIONS

    allocations = [protocol.AllocationInfo("t" * 128, protocol.MAX_ALLOCATION)] * MAX_ALLOCATIONS
    full = protocol.Granted(
        mode=LeaseMode.RO, generation=1, fresh=False, manifest=bytes(protocol.MAX_MANIFEST), allocations=allocations
    )
    assert len(protocol.encode(full)) <= MAX_FRAME
