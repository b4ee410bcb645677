from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms import protocol
from gms.allocations import MAX_CHUNKS
from gms.protocol import HEADER_BYTES, MAX_FRAME, ErrorCode, FrameDecoder, GmsError, LeaseMode, Part

INFO = protocol.AllocationInfo("w", 4096, 1024)
STATUS = protocol.Status(
    device="cpu:0",
    device_id="cpu:0",
    pools=[
        protocol.PoolStatus(
            name="kv",
            state="WRITING",
            generation=3,
            epoch=7,
            bytes=4096,
            high_water_bytes=8192,
            orphaned_bytes=0,
            waiting=1,
            waits=["engine b waits"],
            leases=[protocol.LeaseInfo("a", "i", None, LeaseMode.RW)],
            allocations=[INFO],
            corrupt="it is not",
        )
    ],
    total_bytes=4096,
    high_water_bytes=8192,
    memory_limit=None,
    bytes_by_owner={"engine a": 4096},
    memory_waits=[],
    clients=2,
    journal="",
)
REQUESTS: list[protocol.Request] = [
    protocol.Hello(
        version=2, client="engine", engine="a", instance="i", device="cuda:0", device_id="GPU-1", epoch=3, fds=2
    ),
    protocol.Attach(pool="weights/0a1b", mode=LeaseMode.RW_OR_RO, epoch=5, timeout_seconds=1.5, verify=True),
    protocol.Allocate(pool="kv", tag="pages", size_bytes=4096, timeout_seconds=3.0),
    protocol.Export(pool="kv_index", tag="index", first=64),
    protocol.PutManifest(pool="kv", manifest=b"\x00m"),
    protocol.GetManifest(pool="kv"),
    protocol.Commit(pool="weights/0a1b", manifest=b"\x00m", digests={"w": [b"1234", b"5678"]}),
    protocol.Release(pool="kv", quiesced=True),
    protocol.Adopt(
        pool="kv",
        generation=3,
        mode=LeaseMode.RW,
        epoch=7,
        parts=[Part("pages", 0, 64), Part("index", 3, 1)],
        more=True,
        fds=64,
    ),
    protocol.Verify(pool="weights/0a1b", digests={"w": [b"1234"]}),
    protocol.GetStatus(),
    protocol.GetEvents(after=17, timeout_seconds=2.0),
]
REPLIES: list[protocol.Reply] = [
    protocol.Welcome(version=2, device="cpu:0"),
    protocol.Granted(mode=LeaseMode.RO, generation=3, fresh=False, manifest=b"m", allocations=[INFO], fds=1),
    protocol.Pages(tag="w", size_bytes=4096, chunk_bytes=1024, created=True, first=0, fds=4),
    protocol.ManifestReply(generation=3, manifest=b"m", allocations=[INFO]),
    protocol.Verified(generation=3, size_bytes=4096),
    protocol.Done(),
    protocol.StatusReply(status=STATUS),
    protocol.EventsReply(
        events=[protocol.Event(seq=1, unix_seconds=1.5, kind="granted", pool="kv", client="engine a", detail="So.")],
        last=1,
    ),
    protocol.Failure(code=ErrorCode.TIMEOUT, message="Too late.", retryable=True),
]


def frames(decoder: FrameDecoder) -> list[bytes]:
    taken = []
    while (frame := decoder.next_frame()) is not None:
        taken.append(frame)
    return taken


def name(message: object) -> str:
    return type(message).__name__


def test_every_message_is_among_those_tried_here() -> None:
    assert {type(message) for message in REQUESTS} == set(protocol.Request.__args__)  # type: ignore[attr-defined]
    assert {type(message) for message in REPLIES} == set(protocol.Reply.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("message", REQUESTS, ids=name)
def test_a_request_survives_its_journey(message: protocol.Request) -> None:
    encoded = protocol.encode(message)
    assert int.from_bytes(encoded[:HEADER_BYTES], "little") == len(encoded) - HEADER_BYTES
    assert protocol.decode_request(encoded[HEADER_BYTES:]) == message


@pytest.mark.parametrize("message", REPLIES, ids=name)
def test_a_reply_survives_its_journey(message: protocol.Reply) -> None:
    assert protocol.decode_reply(protocol.encode(message)[HEADER_BYTES:]) == message


@pytest.mark.parametrize("message", REQUESTS, ids=name)
def test_a_request_is_no_reply_and_cut_short_it_is_nothing(message: protocol.Request) -> None:
    body = protocol.encode(message)[HEADER_BYTES:]
    with pytest.raises(GmsError) as caught:
        protocol.decode_reply(body)
    assert caught.value.code == ErrorCode.INVALID
    for length in range(len(body)):
        with pytest.raises(GmsError) as caught:
            protocol.decode_request(body[:length])
        assert caught.value.code in (ErrorCode.BAD_MESSAGE, ErrorCode.INVALID)
    with pytest.raises(GmsError) as caught:
        protocol.decode_request(body + b"\x00")
    assert caught.value.code == ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name)
def test_whole_bytewise_and_trailing(message: protocol.Request | protocol.Reply) -> None:
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
        decoder.feed(bytes(17))


def test_the_limit_may_be_raised_for_a_peer_that_introduced_itself() -> None:
    decoder = FrameDecoder(max_frame=16)
    decoder.max_frame = 17
    decoder.feed((17).to_bytes(4, "little") + bytes(17))
    assert decoder.next_frame() == bytes(17)


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


def decoded(data: bytes) -> None:
    """A message, or an error with one of two codes: nothing else may come of any bytes."""
    for decode in (protocol.decode_request, protocol.decode_reply):
        code = ""
        try:
            decode(data)
        except GmsError as error:
            code = error.code
        assert code in ("", ErrorCode.BAD_MESSAGE, ErrorCode.INVALID)


@given(st.binary(max_size=200))
def test_random_bytes_are_an_error_with_a_sentence_or_a_message(data: bytes) -> None:
    decoded(data)


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_so_are_messages_with_bytes_changed(message: protocol.Request | protocol.Reply, data: st.DataObject) -> None:
    body = bytearray(protocol.encode(message)[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(body))


FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(REQUESTS), st.data())
def test_so_are_messages_with_fields_of_any_kind(message: protocol.Request, data: st.DataObject) -> None:
    fields = msgspec.to_builtins(message)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(FIELDS)
    decoded(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("nested", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000], ids=["lists", "maps"])
def test_nesting_without_end_is_no_message(nested: bytes) -> None:
    with pytest.raises(GmsError):
        protocol.decode_request(nested)
    known = msgspec.msgpack.encode({"type": "GetStatus"})
    with pytest.raises(GmsError):
        protocol.decode_request(b"\x82" + known[1:] + b"\xa7unknown" + nested)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_count_that_nothing_follows_reserves_nothing(header: bytes) -> None:
    with pytest.raises(GmsError):
        protocol.decode_request(header)


POOL = {"pool": "kv"}
PART = {"tag": "t", "first": 0, "count": 1}
ADOPT = {"type": "Adopt", "pool": "kv", "generation": 1, "mode": "rw", "parts": [PART]}
ALLOCATE = {"type": "Allocate", "pool": "kv", "tag": "t", "size_bytes": 1}
ATTACH = {"type": "Attach", "pool": "kv", "mode": "rw"}
COMMIT = {"type": "Commit", "pool": "weights/a", "manifest": b""}
EXPORT = {"type": "Export", "pool": "kv", "tag": "t"}
HELLO = {
    "type": "Hello",
    "version": 1,
    "client": "e",
    "engine": "a",
    "instance": "i",
    "device": "d",
    "device_id": "d",
}


def parts(number: int, **changed: object) -> list[dict[str, object]]:
    return [{**PART, **changed}] * number


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (ATTACH, {"pool": "weights/"}),
        (ATTACH, {"pool": "weights/a/b"}),
        (ATTACH, {"pool": "weights/a\n"}),
        (ATTACH, {"pool": "weights/" + "a" * 129}),
        (ATTACH, {"pool": "other"}),
        (ATTACH, {"pool": ""}),
        (ATTACH, {"pool": None}),
        (ATTACH, {"mode": "write"}),
        (ATTACH, {"epoch": -1}),
        (ATTACH, {"epoch": 1 << 62}),
        (ATTACH, {"epoch": 1.5}),
        (ATTACH, {"timeout_seconds": -1.0}),
        (ATTACH, {"timeout_seconds": 86401}),
        (ATTACH, {"timeout_seconds": float("nan")}),
        (ATTACH, {"timeout_seconds": float("inf")}),
        (ATTACH, {"verify": 2}),
        (ALLOCATE, {"tag": ""}),
        (ALLOCATE, {"tag": "t" * 129}),
        (ALLOCATE, {"tag": "a\x00b"}),
        (ALLOCATE, {"tag": "a b"}),
        (ALLOCATE, {"size_bytes": 0}),
        (ALLOCATE, {"size_bytes": (1 << 48) + 1}),
        (ALLOCATE, {"size_bytes": (1 << 64) - 1}),
        (ALLOCATE, {"fds": 65}),
        (ALLOCATE, {"fds": -1}),
        (EXPORT, {"first": -1}),
        (EXPORT, {"first": 1 << 32}),
        (COMMIT, {"manifest": bytes(protocol.MAX_MANIFEST + 1)}),
        (COMMIT, {"manifest": "text"}),
        (COMMIT, {"digests": {"t": [b"123"]}}),
        (COMMIT, {"digests": {"t": [bytes(65)]}}),
        (COMMIT, {"digests": {"t": [b"1234"] * (protocol.MAX_PIECES + 1)}}),
        (COMMIT, {"digests": {"a b": []}}),
        ({"type": "PutManifest", **POOL}, {"manifest": bytes(protocol.MAX_MANIFEST + 1)}),
        (ADOPT, {"parts": []}),
        (ADOPT, {"parts": parts(protocol.MAX_PARTS + 1)}),
        (ADOPT, {"parts": parts(1, count=0)}),
        (ADOPT, {"parts": parts(1, count=protocol.MAX_FDS + 1)}),
        (ADOPT, {"parts": parts(1, first=-1)}),
        (ADOPT, {"parts": parts(1, tag="")}),
        (ADOPT, {"generation": -1}),
        (ADOPT, {"generation": 1 << 62}),
        ({"type": "GetEvents"}, {"timeout_seconds": 60.5}),
        ({"type": "GetEvents"}, {"after": -1}),
        (HELLO, {"engine": "a" * 129}),
        (HELLO, {"engine": ""}),
        (HELLO, {"instance": "é"}),
        (HELLO, {"client": "a\nb"}),
        (HELLO, {"device_id": "d" * 129}),
        (HELLO, {"version": "2"}),
        (HELLO, {"epoch": -1}),
        ({}, {"type": "Nonsense"}),
        ({}, {"type": 7}),
        ({}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_out_of_bounds_is_invalid(message: dict[str, object], changed: dict[str, object]) -> None:
    with pytest.raises(GmsError) as caught:
        protocol.decode_request(msgspec.msgpack.encode({**message, **changed}))
    assert caught.value.code == ErrorCode.INVALID
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (ATTACH, {"pool": "weights/" + "a" * 128}),
        (ATTACH, {"timeout_seconds": 86400}),
        (ATTACH, {"epoch": (1 << 62) - 1}),
        (ALLOCATE, {"size_bytes": 1 << 48, "tag": "~" * 128, "fds": 64}),
        (COMMIT, {"manifest": bytes(protocol.MAX_MANIFEST)}),
        (COMMIT, {"digests": {"t": [bytes(64)] * protocol.MAX_PIECES}}),
        (ADOPT, {"parts": parts(protocol.MAX_PARTS, first=(1 << 32) - 1, count=64)}),
        (HELLO, {"engine": "a b", "unknown_to_this_release": 1}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_just_within_is_not(message: dict[str, object], changed: dict[str, object]) -> None:
    protocol.decode_request(msgspec.msgpack.encode({**message, **changed}))


@pytest.mark.parametrize("message", [ADOPT, ALLOCATE, ATTACH, COMMIT, EXPORT, HELLO], ids=lambda m: m["type"])
def test_what_has_no_default_is_due(message: dict[str, object]) -> None:
    protocol.decode_request(msgspec.msgpack.encode(message))
    for field in set(message) - {"type"}:
        with pytest.raises(GmsError) as caught:
            protocol.decode_request(msgspec.msgpack.encode({k: v for k, v in message.items() if k != field}))
        assert caught.value.code == ErrorCode.INVALID


def test_a_message_larger_than_a_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(GmsError, match="does not fit"):
        protocol.encode(protocol.Commit(pool="weights/a", manifest=bytes(MAX_FRAME)))


def test_the_fullest_messages_fit_into_a_frame() -> None:
    manifest, digest = bytes(protocol.MAX_MANIFEST), bytes(16)
    allocations = [protocol.AllocationInfo("t" * 128, protocol.MAX_ALLOCATION, protocol.MAX_ALLOCATION)] * MAX_CHUNKS
    granted = protocol.Granted(mode=LeaseMode.RO, generation=1, fresh=False, manifest=manifest, allocations=allocations)
    assert len(protocol.encode(granted)) <= MAX_FRAME
    (pool,) = STATUS.pools
    full = msgspec.structs.replace(pool, allocations=allocations, waits=["w" * 1000] * 128, corrupt="c" * 1000)
    status = protocol.StatusReply(status=msgspec.structs.replace(STATUS, pools=[full, *[pool] * 63]))
    assert len(protocol.encode(status)) <= MAX_FRAME
    commit = protocol.Commit(pool="weights/a", manifest=manifest, digests={"t": [digest] * protocol.MAX_PIECES})
    assert len(protocol.encode(commit)) <= MAX_FRAME


def test_an_error_is_told_by_its_code() -> None:
    error = GmsError(ErrorCode.BUSY, "Later.", retryable=True)
    assert (error.code, type(error.code), str(error), error.retryable) == ("busy", str, "Later.", True)
    assert not GmsError("of a later release", "What?").retryable
