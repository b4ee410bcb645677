from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai import errors
from app.openai.sse import (
    DONE,
    KEEPALIVE,
    EventSplitter,
    EventTooLarge,
    NotEvents,
    error_event,
    fields,
    split_events,
    without_leading_comments,
)
from app.openai.worker_answers import has_envelope

STREAMS = {
    "LF": b"data: one\n\nevent: x\ndata: two\n\n: note\n\ndata: [DONE]\n\n",
    "CRLF": b"data: one\r\n\r\nevent: x\r\ndata: two\r\n\r\n: note\r\n\r\ndata: [DONE]\r\n\r\n",
    "CR": b"data: one\r\revent: x\rdata: two\r\r: note\r\rdata: [DONE]\r\r",
}
EVENTS = [(b"", b"one"), (b"x", b"two"), (b"", b""), (b"", b"[DONE]")]


def held_by(splitter: EventSplitter) -> bytes:
    """What a splitter holds back: it comes with the next end of an event."""
    return splitter.feed(b"\n\n").removesuffix(b"\n\n")


def collect(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events: list[bytes] = []
    for piece in pieces:
        whole = splitter.feed(piece)
        found = split_events(whole)
        assert b"".join(found) + whole[sum(map(len, found)) :] == whole
        events += found
    return events, held_by(splitter)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_whole(stream: bytes) -> None:
    events, rest = collect([stream])
    assert [fields(event) for event in events] == EVENTS
    assert b"".join(events) == stream
    assert rest == b""


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_byte_by_byte(stream: bytes) -> None:
    events, rest = collect([stream[i : i + 1] for i in range(len(stream))])
    assert [fields(event) for event in events] == EVENTS
    assert b"".join(events) == stream
    assert rest == b""


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("tail", [b"data: thr", b"data: three\n", b":", b"d"])
def test_trailing_bytes_are_held_back(stream: bytes, tail: bytes) -> None:
    splitter = EventSplitter()
    assert splitter.feed(stream + tail) == stream
    assert splitter.incomplete
    assert splitter.feed(b"\n\n") == tail + b"\n\n"


def test_line_ends_alone_are_not_an_incomplete_event() -> None:
    splitter = EventSplitter()
    splitter.feed(b"data: one\r\r\n")
    assert not splitter.incomplete


def test_an_event_leaves_as_soon_as_it_is_whole() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a") == b""
    assert splitter.feed(b"\n") == b""
    assert splitter.feed(b"\ndata: b\n\ndata: c") == b"data: a\n\ndata: b\n\n"
    assert splitter.feed(b"\n\n") == b"data: c\n\n"


def test_the_usual_read_is_passed_on_uncopied() -> None:
    read = b"data: one\n\ndata: two\n\n"
    assert EventSplitter().feed(read) is read


def test_crlf_cut_in_the_middle_of_its_end() -> None:
    """The last LF belongs to the event: it must not be left over for the next one."""
    splitter = EventSplitter()
    assert splitter.feed(b"data: one\r\n\r") == b""
    assert splitter.feed(b"\n") == b"data: one\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 64])
def test_oversize(size: int) -> None:
    splitter = EventSplitter(limit_bytes=100)
    for _ in range(100 // size):
        splitter.feed(b":" * size)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        splitter.feed(b":" * size)


@pytest.mark.parametrize("junk", [b"x", b"<html>", b"{}", b"\0", b"HTTP/1.1 200 OK"])
def test_what_is_no_stream_of_events(junk: bytes) -> None:
    with pytest.raises(NotEvents):
        EventSplitter().feed(junk + b"\n\n")


def test_only_the_beginning_can_tell() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert splitter.feed(b"unknown: 2\n\n") == b"unknown: 2\n\n"


def test_many_events_in_one_read_are_not_oversize() -> None:
    stream = b"data: 0123456789\n\n" * 100
    assert EventSplitter(limit_bytes=100).feed(stream + b"data") == stream


LINE = st.sampled_from([b"data: x", b"event: y", b": c", b"data", b"id: 1"])
ENDING = st.sampled_from([b"\n", b"\r\n", b"\r"])
MIXED = st.lists(st.tuples(st.one_of(st.just(b""), LINE), ENDING), max_size=30).map(
    lambda lines: b"".join(text + end for text, end in lines)
)


def meaning(stream: bytes) -> list[tuple[bytes, bytes]]:
    """What an SSE parser makes of it, by the letter of the specification."""
    found = []
    current: list[bytes] = []
    *lines, _ = re.split(rb"\r\n|\n|\r", stream)
    for line in lines:
        if line:
            current.append(line)
        elif current:
            found.append(fields(b"\n".join(current)))
            current = []
    return found


@given(stream=MIXED, cuts=st.lists(st.integers(0, 200)))
def test_any_mixture_of_line_ends_cut_anywhere(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = EventSplitter()
    out = b""
    for start, end in pairwise(edges):
        out += splitter.feed(stream[start:end])
        # What has left is whole: nothing that follows could change its meaning.
        assert meaning(out) == meaning(out + b"data: next\n\n")[:-1]
    # Nothing that is whole stays, but for an end whose last CR may become a CRLF.
    held = held_by(splitter)
    assert out + held == stream
    assert meaning(held) == [] or held.endswith(b"\r")


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    splitter = EventSplitter()
    out = splitter.feed(b":" + data)
    assert out + held_by(splitter) == b":" + data


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (KEEPALIVE, True),
        (b": a\n: b\n\n", True),
        (b": a\r\n\r\n", True),
        (b": a\r: b\r\r", True),
        (b"\n\n", True),
        (DONE, False),
        (b": a\ndata: x\n\n", False),
        (b"event: ping\n\n", False),
    ],
)
def test_leading_comments(event: bytes, expected: bool) -> None:
    kept = b"" if expected else event
    assert without_leading_comments(event) == kept
    assert without_leading_comments(KEEPALIVE + event) == kept
    assert without_leading_comments(event + DONE + KEEPALIVE) == kept + DONE + KEEPALIVE
    assert without_leading_comments(b": ping\r\n\r\n: ping\r\n\r\n" + event) == kept


def test_many_leading_comments_are_no_work() -> None:
    """A worker sends them as fast as it can."""
    started = time.process_time()
    for flood in (b": hi\n\n" * 170_000, b"\n" * 1_000_000, b":\r\r" * 300_000):
        assert without_leading_comments(flood + DONE) == DONE
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: a\ndata: b\n\n", (b"", b"a\nb")),
        (b"data:a\n\n", (b"", b"a")),
        (b"data:  a\n\n", (b"", b" a")),
        (b"event: e\ndata\n\n", (b"e", b"")),
        (b": data: no\n\n", (b"", b"")),
    ],
)
def test_fields(event: bytes, expected: tuple[bytes, bytes]) -> None:
    assert fields(event) == expected


@pytest.mark.parametrize("named", [False, True])
def test_error_event(named: bool) -> None:
    events = split_events(error_event(errors.worker_lost("gone"), named=named))
    assert events[-1] == DONE
    name, data = fields(events[0])
    assert name == (b"error" if named else b"")
    assert has_envelope(data)
