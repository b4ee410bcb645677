"""Framed answers: whole, byte by byte, however cut, with trailing bytes, oversize, and what is none."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.frames import BadFrame, FrameReader
from app.openai.units import BadNote, NoteLog
from workers.resume import encode_framed, note

NOTES = note(events=0, new=0, crc=0, rest="g=0:7 t=1 p=2") + note(events=0, new=0, crc=0, rest="g=0:8,9")
HEADERS = [(b"content-type", b"application/json"), (b"x-more", b"a: b")]


def read(data: bytes, *cuts: int) -> tuple[int, list[tuple[bytes, bytes]], bytes, NoteLog]:
    reader = FrameReader(NoteLog())
    body = b"".join(reader.feed(data[a:b]) for a, b in itertools.pairwise([0, *cuts, len(data)]))
    assert reader.ended
    assert not reader.incomplete
    return reader.status, reader.headers, body, reader.log


def feed(reader: FrameReader, data: bytes, step: int) -> None:
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])


@pytest.mark.parametrize("body", [b'{"a":1}', b"", b"one\ntwo\n\nthree\n", b"data: x\n\n", b"\n"])
def test_whole_and_byte_by_byte(body: bytes) -> None:
    sent = NOTES + encode_framed(200, HEADERS, body)
    for cuts in ([], list(range(1, len(sent)))):
        status, headers, found, log = read(sent, *cuts)
        assert (status, headers, found) == (200, HEADERS, body)
        assert log.rest == b"g=0:7 t=1 p=2\n0:8,9\n"
        assert log.tokens == 3


@given(body=st.binary(max_size=80).map(lambda b: b.replace(b"\r", b"")), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_the_result_does_not_depend_on_the_cuts(body: bytes, cuts: list[int]) -> None:
    sent = NOTES + encode_framed(404, HEADERS, body)
    assert read(sent, *sorted(min(cut, len(sent)) for cut in cuts))[:3] == (404, HEADERS, body)


def test_the_body_is_handed_on_as_it_comes() -> None:
    reader = FrameReader(NoteLog())
    frame = encode_framed(200, HEADERS, b"x" * 100)
    at = frame.index(b"data: ") + 6
    assert reader.feed(NOTES + frame[: at + 10]) == b"x" * 10
    assert (reader.status, reader.headers, reader.notes) == (200, HEADERS, 2)
    assert reader.incomplete
    assert not reader.ended
    assert reader.feed(frame[at + 10 :]) == b"x" * 90
    assert reader.ended


def test_a_head_is_known_when_its_body_begins() -> None:
    reader = FrameReader(NoteLog())
    reader.feed(b"event: body\nstatus: 200\nheader: X-A:  b\t\n")
    assert not reader.head_known
    reader.feed(b"data: ")
    assert reader.head_known
    assert (reader.status, reader.headers) == (200, [(b"x-a", b"b")])


def test_comments_and_line_ends_around_it_are_passed_over() -> None:
    assert read(b": ping\n\n" + NOTES + b"\n: pong\n" + encode_framed(200, [], b"{}") + b"\n: bye\n\n")[2] == b"{}"


@pytest.mark.parametrize(
    "data",
    [
        b"data: {}\n\n",
        b"event: error\ndata: {}\n\n",
        b"event: body\ndata: {}\n\n",
        b"event: body\nstatus: 20\ndata: {}\n\n",
        b"event: body\nstatus: 2000\ndata: {}\n\n",
        b"event: body\nstatus: 200\n\n",
        b"event: body\nstatus: 200\nheader: x\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: : y\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x:y: z\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader:  x: y\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x\t: y\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x y: z\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x\xe4: y\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x: y\rset-cookie: z\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x: y\r\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x: y\0z\ndata: {}\n\n",
        b"event: body\nstatus: 200\nheader: x: " + b"y" * 70_000 + b"\ndata: {}\n\n",
        b"event: body\nstatus: 200\n" + b"header: x: %b\n" % (b"y" * 1000) * 70 + b"data: {}\n\n",
        b"event: body\nstatus: 200\nstatus: 500\ndata: {}\n\n",
        b"event: body\nstatus: 200\nretry: 3\ndata: {}\n\n",
        b"event: body\nstatus: 200\ndata: {}\nstatus: 201\n\n",
        b"event: body\nstatus: 200\ndata: {}\n\ndata: {}\n\n",
        b"event: body\nstatus: 200\n" + b"header: a: b\n" * 300,
        b'{"no": "frame"}\n',
    ],
)
def test_what_is_none_is_refused(data: bytes) -> None:
    for step in (len(data), 1):
        reader = FrameReader(NoteLog())
        with pytest.raises(BadFrame):
            feed(reader, data, step)


@pytest.mark.parametrize("note", [b"e=x", b"e=1 n=1 c=0", b"e=1 n=0 c=0", b"e=0 n=1 c=0"])
def test_a_note_that_cannot_be_read_or_counts_events_is_refused(note: bytes) -> None:
    with pytest.raises(BadNote):
        FrameReader(NoteLog()).feed(b": t " + note + b"\n")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_line_without_end_is_refused(step: int) -> None:
    reader = FrameReader(NoteLog(), limit_bytes=1000)
    with pytest.raises(BadFrame):
        feed(reader, b":" * 2000, step)


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_anything_else_is_read_or_refused(parts: list[bytes]) -> None:
    reader = FrameReader(NoteLog(), limit_bytes=50)
    try:
        for part in parts:
            reader.feed(b"event: body\n" + part)
    except (BadFrame, BadNote):
        pass


def test_many_small_reads_of_a_long_line_cost_as_much_as_few() -> None:
    reader = FrameReader(NoteLog())
    began = time.process_time()
    for _ in range(20_000):
        reader.feed(b":" * 100)
    assert time.process_time() - began < 1.0
