"""The forms of a resume: notes, bodies, frames."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.units import UnitSplitter
from workers.resume import (
    ResumeError,
    ResumeHead,
    crc32,
    decode_framed,
    decode_outputs,
    decode_resume,
    encode_framed,
    encode_outputs,
    encode_resume,
    note,
    reason_word,
)

tokens = st.lists(st.integers(0, 200_000), max_size=5)
outputs = st.lists(st.lists(st.tuples(st.integers(0, 9), tokens), min_size=1, max_size=3), min_size=1, max_size=5)


@given(outputs)
def test_outputs_come_back_as_they_were(given_outputs: list[list[tuple[int, list[int]]]]) -> None:
    text = encode_outputs(given_outputs)
    assert " " not in text
    assert decode_outputs(text) == given_outputs


def test_the_form_of_a_note() -> None:
    line = note(events=2, new=1, crc=0x9F02AB13, rest="g=" + encode_outputs([[(0, [318, 262])], [(0, [1204])]]))
    assert line == b": t e=2 n=1 c=9f02ab13 g=0:318,262|0:1204\n"
    assert note(events=0, new=0, crc=0, rest="") == b": t e=0 n=0 c=0\n"


def test_what_the_gateway_keeps_of_notes_is_what_a_worker_can_resume_from() -> None:
    first, second, third = b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"
    crc = crc32(first)
    splitter = UnitSplitter()
    sent = splitter.feed(note(events=1, new=1, crc=crc, rest="g=0:7|0:8,9+1:3 t=1764450000 p=16") + first)
    crc = crc32(second, crc)
    sent += splitter.feed(note(events=2, new=1, crc=crc, rest="g=0:10") + second)
    crc = crc32(third, crc)
    sent += splitter.feed(note(events=3, new=1, crc=crc, rest="g=1:11 l=abc") + third)
    assert sent == first + second + third
    log = splitter.log
    notes = log.rest + b"x=multi_prompt\n"  # which the gateway does not keep, since it ends what can be resumed
    head = ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(notes))
    resume, body = decode_resume(encode_resume(head, notes, b'{"a": "\xc3\xa9"}'))
    assert body == b'{"a": "\xc3\xa9"}'
    assert (resume.events, resume.crc, resume.attempt) == (3, crc32(first + second + third), 2)
    assert resume.outputs == [[(0, [7])], [(0, [8, 9]), (1, [3])], [(0, [10])], [(1, [11])]]
    assert (resume.created, resume.cached_tokens, resume.logprobs) == (1764450000, 16, ["abc"])
    assert resume.unresumable == "multi_prompt"
    assert resume.tokens == 6


def test_what_an_engine_says_beside_tokens() -> None:
    notes = b"g=0:5 l=aa t=7 k=1f p=3 w=2\n0:6\ng=0:7|1:8 l=bb|cc k=20\n"
    resume, _ = decode_resume(encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, b"{}"))
    assert resume.logprobs == ["aa", "bb", "cc"]
    assert (resume.created, resume.key, resume.cached_tokens, resume.cache_writes) == (7, "1f", 3, 2)


def test_a_resume_without_notes() -> None:
    resume, body = decode_resume(encode_resume(ResumeHead(events=0, crc="0", notes=0, attempt=3), b"", b"{}"))
    assert (resume.outputs, resume.created, resume.attempt, body) == ([], None, 3, b"{}")


GOOD = encode_resume(ResumeHead(events=1, crc="1f", notes=4), b"0:7\n", b"{}")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\0\0{}",
        b"\xff\xff\xff\xff" + GOOD[4:],
        GOOD[:20],
        GOOD.replace(b'"events":1', b'"events":x'),
        GOOD.replace(b'"crc":"1f"', b'"crc":"zz"'),
        GOOD.replace(b'"notes":4', b'"notes":9'),
        GOOD.replace(b"0:7\n", b"0:x\n"),
        GOOD.replace(b"0:7\n", b"\xff:7\n"),
        GOOD.replace(b"0:7\n", b"p=x\n"),
        GOOD.replace(b"0:7\n", b"= t\n"),
    ],
)
def test_a_body_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(ResumeError):
        decode_resume(raw)


@pytest.mark.parametrize(
    "notes",
    [
        b"|".join([b"0:5"] * 1_000_000),
        b"|".join([b"0:"] * 1_000_000),
        b"0:" + b",".join([b"5"] * 1_000_000),
        b"0:5\n" * 1_000_000,
        b"\n" * 1_000_000,
        b"g=0:5 l=" + b"|" * 1_000_000,
        b"g=0:5" + b" t=1" * 1_000_000,
        b"0:" + b"9" * 5000,
        b"0:12345678901",
        b"12345:1",
        b"0:1_0",
        b"0: 5",
        b"0:-1",
        b"0:5,",
        b"g=0:5 x=" + b"a" * 5000,
    ],
)
def test_notes_that_are_too_many_or_none_are_refused_at_once_and_not_repeated(notes: bytes) -> None:
    raw = encode_resume(ResumeHead(events=1, crc="1f", notes=len(notes)), notes, b"{}")
    began = time.process_time()
    with pytest.raises(ResumeError) as refused:
        decode_resume(raw)
    assert time.process_time() - began < 0.5
    assert len(str(refused.value)) < 100


@given(st.binary(max_size=200))
def test_any_bytes_give_a_resume_or_its_error(raw: bytes) -> None:
    with contextlib.suppress(ResumeError):
        decode_resume(raw)


@pytest.mark.parametrize("body", [b"{}", b"", b'{\n  "pretty": 1\n}\n', b"data: {}\n\nevent: x", b'{"a":"\r\x00\xff"}'])
def test_a_framed_answer_comes_back_byte_for_byte(body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-a", b"b: c")]
    event = encode_framed(200, headers, body)
    assert event.count(b"\n\n") == 1
    assert decode_framed(event) == (200, headers, body)


@pytest.mark.parametrize(
    "event", [b"data: x\n\n", b"event: body\n\n", b"event: body\nstatus: x\n\n", b"event: body\nstatus: 200"]
)
def test_another_event_is_no_framed_answer(event: bytes) -> None:
    with pytest.raises(ResumeError):
        decode_framed(event)


def test_a_reason_is_one_word() -> None:
    assert reason_word("multi_prompt") == "multi_prompt"
    with pytest.raises(ValueError, match="not one word"):
        reason_word("two words")
