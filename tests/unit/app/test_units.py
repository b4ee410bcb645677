"""The unit splitter: whole, byte by byte, with trailing bytes, oversize, and however the bytes were cut."""

from __future__ import annotations

import itertools
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.sse import MAX_EVENT_BYTES, EventTooLarge, NotEvents
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


@pytest.mark.parametrize("junk", [b"x", b"<html>", b"{}", b"\0", b"HTTP/1.1 200 OK"])
@pytest.mark.parametrize("rest", [b"", b"\n\n", b"\n: t e=1 n=1 c=0\ndata: x\n\n"])
def test_what_is_no_stream_of_events(junk: bytes, rest: bytes) -> None:
    with pytest.raises(NotEvents):
        UnitSplitter().feed(junk + rest)


UNCOUNTED = {
    "an event before any note": [b"data: x\n\n"],
    "an event after the unit's": [b": t e=1 n=1 c=0\ndata: x\n\n", b"data: x\n\n"],
    "one after a comment": [b": t e=1 n=1 c=0\ndata: x\n\n: ping\n\n", b"data: x\n\n"],
    "one within a comment": [b": ping\n", b"data: x\n\n"],
    "one within a comment, by another line end": [b": ping\rdata: x\r\r\n\n"],
    "one after a note of none": [b": t e=0 n=0 c=0 g=0:1\n", b"data: x\n\n"],
    "too few": [b": t e=2 n=2 c=0\ndata: x\n\n", b": t e=3 n=1 c=0\ndata: x\n\n"],
    "half an event": [b": t e=1 n=1 c=0\ndata: x\n", b": t e=2 n=1 c=0\ndata: x\n\n"],
    "a count that jumps": [b": t e=1 n=1 c=0\ndata: x\n\n", b": t e=3 n=1 c=0\ndata: x\n\n"],
    "a count that stays": [b": t e=1 n=1 c=0\ndata: x\n\n", b": t e=1 n=1 c=0\ndata: x\n\n"],
    "a count that begins late": [b": t e=2 n=1 c=0\ndata: x\n\n"],
}


@pytest.mark.parametrize("pieces", UNCOUNTED.values(), ids=list(UNCOUNTED))
@pytest.mark.parametrize("step", [0, 1, 7])
def test_what_is_not_as_the_notes_say_does_not_leave(pieces: list[bytes], step: int) -> None:
    sent = b"".join(pieces)
    splitter = UnitSplitter()
    left = b""
    with pytest.raises(BadNote):  # noqa: PT012 (some of it is good)
        for part in pieces if not step else [sent[i : i + step] for i in range(0, len(sent), step)]:
            left += splitter.feed(part)
    assert left.replace(b": ping\n\n", b"") == b"data: x\n\n" * splitter.log.events


def begun(log: NoteLog) -> None:
    UnitSplitter(log).feed(stream([event("a")], [event("b"), event("c")])[0])


REST = stream([event("a")], [event("b"), event("c")], [event("d")], [event("e")])[0]
FROM_D = REST[REST.index(b": t e=4") :]
OTHER = stream([event("A")], [event("b"), event("c")], [event("d")], [event("e")])[0]


@pytest.mark.parametrize("cut", range(len(FROM_D) + 1))
@pytest.mark.parametrize("before", [b"", b": ping\n\n"])
def test_another_worker_goes_on(cut: int, before: bytes) -> None:
    log = NoteLog()
    begun(log)
    sent = before + FROM_D
    splitter = UnitSplitter(log, resumes=True)
    assert splitter.feed(sent[:cut]) + splitter.feed(sent[cut:]) == before + event("d") + event("e")
    assert log.events == 5


@pytest.mark.parametrize("cut", [0, 5, 40, 60])
@pytest.mark.parametrize(
    "sent",
    [
        REST,
        REST[REST.index(b": t e=3") :],
        REST[REST.index(b": t e=5") :],
        OTHER[OTHER.index(b": t e=4") :],
        FROM_D.replace(b'"d"', b'"D"'),
        b": t e=3 n=0 c=1f g=0:9\n" + FROM_D,
        event("d") + FROM_D,
    ],
    ids=["from the start", "repeats a unit", "drops a unit", "another answer", "other bytes", "no events", "no note"],
)
def test_another_worker_that_goes_on_elsewhere_is_found_out(sent: bytes, cut: int) -> None:
    log = NoteLog()
    begun(log)
    said = (log.events, log.crc, bytes(log.rest))
    splitter = UnitSplitter(log, resumes=True)
    with pytest.raises(BadNote):  # noqa: PT012 (it may be found out in either piece)
        assert splitter.feed(sent[:cut]) == b""
        splitter.feed(sent[cut:])
    assert (log.events, log.crc, bytes(log.rest)) == said


def test_the_joint_is_checked_at_a_note_without_events_too() -> None:
    log = NoteLog()
    begun(log)
    note = b": t e=3 n=0 c=%b g=0:9\n" % log.crc
    assert UnitSplitter(log, resumes=True).feed(note + FROM_D) == event("d") + event("e")


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
        b"data: ",
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
    lines=st.lists(
        st.sampled_from(
            [b"data: x\n\n", b": ping\n\n", b": t e=2 n=2 c=0\n", b": t e=0 n=0 c=0\n", b": t e=3 n=1 c=0\n"]
        )
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_whether_it_is_good_does_not_depend_on_the_cuts_and_the_log_is_what_has_left(
    lines: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(lines) + b": ping\n\n: t e=9 n=0 c=1 x"

    def fed(*cuts: int) -> tuple[bytes, bool, NoteLog]:
        splitter, left = UnitSplitter(), b""
        try:
            for a, b in itertools.pairwise([0, *cuts, len(sent)]):
                left += splitter.feed(sent[a:b])
        except BadNote:
            return left, False, splitter.log
        return left, True, splitter.log

    whole, good, _ = fed()
    pieces, also_good, log = fed(*sorted(min(cut, len(sent)) for cut in cuts))
    assert also_good is good
    assert pieces == whole or (not good and pieces.startswith(whole))
    assert pieces.count(b"data: x\n\n") <= log.events <= pieces.count(b"\n\n")


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
    assert log.unresumable == "notes"
    assert not log.rest
    log.add(b"g=1")
    assert not log.rest


@pytest.mark.parametrize("said", [b"g=0:%d", b"g=0:%d l=a:1,b:2 p=3"])
def test_a_log_of_too_many_tokens_is_given_up_soon(said: bytes) -> None:
    log = NoteLog(max_tokens=1000)
    added = 0
    while not log.unresumable:
        added += 1
        log.add(said % (added + 10**5))
    assert log.unresumable == "tokens"
    assert 1000 < added < 1300
    assert not log.rest


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ([], 0),
        ([b"g=0:318"], 1),
        ([b"g=0:318,262|0:1204"], 3),
        ([b"g=0:1,2+1:3|1:4,5,6", b"", b"g=0:7"], 7),
        ([b"g=0:1 t=17 p=3", b"t=1", b"g=0:2,3 l=0:9,8"], 3),
        ([b"g=0:|0:4+1:"], 1),
    ],
)
def test_tokens_are_counted(said: list[bytes], tokens: int) -> None:
    log = NoteLog()
    for line in said:
        log.add(line)
    assert log.tokens == tokens


@pytest.mark.parametrize("said", [b"g=0:1 x=tool_ids", b"x=tool_ids", b"x=tool_ids t=3"])
def test_a_note_may_say_that_nobody_can_go_on(said: bytes) -> None:
    log = NoteLog()
    log.add(b"g=0:1")
    log.add(said)
    assert log.unresumable == "engine:tool_ids"
    assert not log.rest


def test_what_only_looks_like_that_word_is_no_reason() -> None:
    log = NoteLog()
    log.add(b"g=0:1 l=max=3 p=4")
    assert not log.unresumable


def test_a_read_with_a_bad_note_leaves_none_of_its_notes() -> None:
    """Its good units do not leave either, so whoever goes on with the answer begins before them."""
    splitter = UnitSplitter()
    splitter.feed(b": t e=1 n=1 c=1 g=0:1\ndata: a\n\n")
    with pytest.raises(BadNote):
        splitter.feed(
            b": t e=2 n=1 c=2 g=0:2\ndata: b\n\n: t e=3 n=x c=3 g=0:3\ndata: c\n\n: t e=4 n=1 c=4 g=0:4\ndata: d\n\n"
        )
    assert (splitter.log.events, splitter.log.crc, bytes(splitter.log.rest)) == (1, b"1", b"0:1\n")


def test_attempts_write_into_one_log() -> None:
    log = NoteLog()
    sent, seen, crc = stream([event("a")], [event("b")])
    first, second = sent[: sent.rindex(b": t ")], sent[sent.rindex(b": t ") :]
    assert UnitSplitter(log).feed(first + second[:20]) + UnitSplitter(log, resumes=True).feed(second) == seen
    assert (log.events, int(log.crc, 16), bytes(log.rest)) == (2, crc, b"0:0\n0:1\n")
    log.clear()
    assert (log.events, log.crc, bytes(log.rest), log.tokens) == (0, b"0", b"", 0)
