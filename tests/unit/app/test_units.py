"""The unit splitter: whole, byte by byte, with trailing bytes, oversize, and however the bytes were cut."""

from __future__ import annotations

import itertools
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.sse import MAX_EVENT_BYTES, EventTooLarge
from app.openai.units import MAX_LOG_BYTES, BadNote, NoteLog, UnitSplitter


def event(text: str) -> bytes:
    return b'data: {"text":"%b"}\n\n' % text.encode()


def stream(*units: list[bytes] | bytes, said: str = "g=0:{0}") -> tuple[bytes, bytes, int]:
    """Units as a worker sends them (a list of events), comments between them (bytes): the stream, what a client is to
    see of it, and the crc of the events."""
    sent, seen = b"", b""
    count = crc = 0
    for number, unit in enumerate(units):
        if isinstance(unit, bytes):
            sent += unit
            seen += unit
            continue
        events = b"".join(unit)
        count += len(unit)
        crc = zlib.crc32(events, crc)
        sent += b": t e=%d n=%d c=%08x %b\n" % (count, len(unit), crc, said.format(number).encode()) + events
        seen += events
    return sent, seen, crc


def feed(splitter: UnitSplitter, data: bytes, *cuts: int) -> list[bytes]:
    bounds = [0, *cuts, len(data)]
    return [splitter.feed(data[a:b]) for a, b in itertools.pairwise(bounds)]


SEVERAL = ([event("a")], [], [event("b"), event("c")], b": ping\n\n", [], [], [event(": t e=1")], [b"data: [DONE]\n\n"])


def test_a_unit_passes_whole_and_without_its_note() -> None:
    sent, seen, crc = stream([event("a")])
    splitter = UnitSplitter()
    assert splitter.feed(sent) == seen
    assert not splitter.incomplete
    assert (splitter.log.events, int(splitter.log.crc, 16), bytes(splitter.log.rest)) == (1, crc, b"0:0\n")


def test_several_units_in_one_read() -> None:
    sent, seen, crc = stream(*SEVERAL)
    splitter = UnitSplitter()
    assert splitter.feed(sent) == seen
    assert splitter.log.events == 5
    assert int(splitter.log.crc, 16) == crc
    assert splitter.log.rest.count(b"\n") == 7


@pytest.mark.parametrize("cut", range(1, len(stream(*SEVERAL)[0])))
def test_a_unit_is_held_until_its_last_event_is_there(cut: int) -> None:
    """What left at the cut are whole units: none is there in part, and the log knows of no more than what left."""
    sent, seen, crc = stream(*SEVERAL)
    splitter = UnitSplitter()
    first = splitter.feed(sent[:cut])
    allowed = {b""}
    for count in range(1, len(SEVERAL) + 1):
        allowed.add(stream(*SEVERAL[:count])[1])
    assert first in allowed
    events = first.replace(b": ping\n\n", b"")
    assert splitter.log.events == events.count(b"\n\n")
    assert int(splitter.log.crc, 16) == zlib.crc32(events)
    assert first + splitter.feed(sent[cut:]) == seen
    assert int(splitter.log.crc, 16) == crc


def test_byte_by_byte() -> None:
    sent, seen, crc = stream(*SEVERAL)
    splitter = UnitSplitter()
    assert b"".join(splitter.feed(sent[i : i + 1]) for i in range(len(sent))) == seen
    assert (splitter.log.events, int(splitter.log.crc, 16)) == (5, crc)
    assert splitter.log.rest.count(b"\n") == 7
    assert not splitter.incomplete


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
units = st.lists(st.one_of(st.lists(texts.map(event), max_size=3), st.just(b": ping\n\n")), max_size=6)


@given(units=units, cuts=st.lists(st.integers(0, 600), max_size=6))
def test_the_result_does_not_depend_on_the_cuts(units: list[list[bytes] | bytes], cuts: list[int]) -> None:
    sent, seen, crc = stream(*units)
    splitter = UnitSplitter()
    assert b"".join(feed(splitter, sent, *sorted(min(cut, len(sent)) for cut in cuts))) == seen
    if any(isinstance(unit, list) for unit in units):
        assert int(splitter.log.crc, 16) == crc


@given(data=st.lists(st.binary(max_size=40), max_size=8))
def test_anything_else_is_passed_held_or_refused(data: list[bytes]) -> None:
    splitter = UnitSplitter(limit_bytes=100)
    try:
        for part in data:
            splitter.feed(b": t e=1 n=1 c=0 g=" + part)
    except (BadNote, EventTooLarge):
        pass


def test_trailing_bytes_are_held() -> None:
    sent, seen, _ = stream([event("a")])
    splitter = UnitSplitter()
    assert splitter.feed(sent + b": t e=2 n=1") == seen
    assert splitter.incomplete
    assert splitter.log.events == 1


def test_an_unending_unit_is_refused() -> None:
    splitter = UnitSplitter(limit_bytes=100)
    assert splitter.feed(b": t e=1 n=1 c=0\ndata: " + b"x" * 70) == b""
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x" * 100)


@pytest.mark.parametrize(
    "begun",
    [
        b": t e=1 n=9999 c=0\n",
        b": t e=1 n=1 c=0\n",
        b"",
        b": ping\n",
    ],
    ids=["many events", "one event", "no note", "a comment"],
)
@pytest.mark.parametrize("piece", [b"data: {}\n" * 16 + b"x", b"x" * 160], ids=["lines", "one line"])
def test_what_comes_in_many_pieces_is_looked_through_once(begun: bytes, piece: bytes) -> None:
    """Looking through all of it at each read would take minutes."""
    splitter = UnitSplitter()
    splitter.feed(begun)
    started = time.process_time()
    while len(splitter._held) + len(piece) <= MAX_EVENT_BYTES:
        assert splitter.feed(piece) == b""
    with pytest.raises(EventTooLarge):
        splitter.feed(piece)
    assert time.process_time() - started < 5


def test_small_events_of_a_large_unit_are_counted_once() -> None:
    splitter = UnitSplitter()
    splitter.feed(b": t e=9999 n=9999 c=0\n")
    started = time.process_time()
    for _ in range(9998):
        assert splitter.feed(b"data: {}\n\n") == b""
    assert splitter.feed(b"data: {}\n") == b""
    assert splitter.feed(b"\n") == b"data: {}\n\n" * 9999
    assert time.process_time() - started < 2


@given(
    lines=st.lists(st.sampled_from([b"data: x\n\n", b": ping\n\n", b": t e=1 n=2 c=0\n", b": t e=1 n=0 c=0\n"])),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_what_has_left_does_not_depend_on_the_cuts_whatever_it_was(lines: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(lines) + b": t e=9 n=0 c=1\n"
    whole = UnitSplitter()
    pieces = UnitSplitter()
    assert whole.feed(sent) == b"".join(feed(pieces, sent, *sorted(min(cut, len(sent)) for cut in cuts)))
    assert whole.log.rest == pieces.log.rest


@pytest.mark.parametrize(
    "note",
    [b"", b"e=1", b"e=1 n=1", b"e=x n=1 c=0", b"e=1 n=-1 c=0", b"e=1 n=1 c=zz", b"e=1  n=1 c=0", b"e=1 n=10000 c=0"],
)
def test_a_note_that_is_none(note: bytes) -> None:
    with pytest.raises(BadNote):
        UnitSplitter().feed(b": t " + note + b"\ndata: x\n\n")
    with pytest.raises(BadNote):
        UnitSplitter().feed(b": t e=1 n=1 c=0\ndata: x\n\n: t " + note + b"\ndata: x\n\n: t e=2 n=1 c=0\ndata: x\n\n")


def test_what_says_more_than_groups_is_kept_as_it_came() -> None:
    splitter = UnitSplitter()
    splitter.feed(
        b": t e=1 n=1 c=0 g=0:1 t=17 p=0\ndata: x\n\n"
        b": t e=2 n=1 c=0 g=0:2,3|1:4\ndata: x\n\n: t e=3 n=1 c=0\ndata: x\n\n"
    )
    assert splitter.log.rest == b"g=0:1 t=17 p=0\n0:2,3|1:4\n\n"


def test_a_log_that_grows_too_large_is_given_up() -> None:
    log = NoteLog()
    log.add(b"g=" + b"1" * MAX_LOG_BYTES)
    assert log.overflowed
    assert not log.rest
    log.add(b"g=1")
    assert not log.rest
