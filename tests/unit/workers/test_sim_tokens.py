from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.sim import tokens
from workers.engines.sim.stops import StopFilter
from workers.engines.sim.tokens import (
    PAGE_BYTES,
    VOCAB_SIZE,
    WORDS,
    WeightsPattern,
    decode,
    encode,
    expected_text,
    expected_tokens,
)


def test_words_are_unique_so_that_a_token_has_one_text() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert len(set(tokens.PIECES)) == VOCAB_SIZE


@given(st.text(max_size=200))
def test_encoding_loses_nothing(text: str) -> None:
    ids = encode(text)
    assert all(0 <= token < VOCAB_SIZE for token in ids)
    if "\ufffd" not in text:
        assert decode(ids) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("the", 1), (" the", 1), ("the house", 2), ("the  house", 3), ("the\nhouse", 3), ("東京", 1), ("xyz", 3)],
)
def test_known_words_are_one_token(text: str, count: int) -> None:
    assert len(encode(text)) == count


def test_bytes_that_are_not_utf8_decode_to_a_replacement() -> None:
    assert decode([0xFF, 0x41]) == "\ufffdA"


def test_the_text_is_a_function_of_seed_prompt_and_index() -> None:
    text = expected_text("a prompt", 40)
    assert text == expected_text("a prompt", 40)
    assert expected_text("a prompt", 20) == " ".join(text.split(" ")[:20])
    assert text != expected_text("another prompt", 40)
    assert text != expected_text("a prompt", 40, seed=1)
    assert text != expected_text("a prompt", 40, weights_bytes=4096)
    assert set(text.split(" ")) <= set(WORDS)


def test_generated_text_is_encoded_to_the_tokens_it_came_from() -> None:
    ids = expected_tokens(encode("a prompt"), 100)
    assert encode(decode(ids)) == ids


@pytest.mark.parametrize("size", [1, PAGE_BYTES, PAGE_BYTES + 1, 3 << 20, (1 << 20) + PAGE_BYTES])
def test_what_is_written_is_what_the_pattern_says(size: int) -> None:
    pattern = WeightsPattern(seed=7, size_bytes=size)
    assert pattern.size_bytes % PAGE_BYTES == 0
    written = memoryview(bytearray(pattern.size_bytes)).cast("Q")
    pattern.fill(written)
    assert len(written) == len(pattern)
    assert list(written) == [pattern[index] for index in range(len(pattern))]


def test_no_page_of_the_weights_can_be_taken_for_another() -> None:
    pattern = WeightsPattern(seed=0, size_bytes=4 << 20)
    written = bytearray(pattern.size_bytes)
    pattern.fill(memoryview(written).cast("Q"))
    pages = {bytes(written[at : at + PAGE_BYTES]) for at in range(0, len(written), PAGE_BYTES)}
    assert len(pages) == len(written) // PAGE_BYTES


def test_a_target_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="words"):
        WeightsPattern(seed=0, size_bytes=8192).fill(memoryview(bytearray(4096)).cast("Q"))
    with pytest.raises(IndexError):
        WeightsPattern(seed=0, size_bytes=4096)[512]


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """What a filter should show, looked at as a whole."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def filtered(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    passes = StopFilter(stops)
    shown = "".join(passes.push(piece) for piece in pieces)
    return shown + ("" if passes.stopped else passes.flush()), passes.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", "b"], [], ("ab", False)),
        (["hello", " world"], ["o w"], ("hell", True)),
        (["he", "llo"], ["llx"], ("hello", False)),
        (["aab"], ["ab"], ("a", True)),
        (["a", "a", "b"], ["aab", "ab"], ("", True)),
        (["x\n", "\ny"], ["\n\n"], ("x", True)),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert filtered(pieces, stops) == expected


ab = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.lists(ab, max_size=12), st.lists(ab, max_size=3))
def test_stop_strings_do_not_depend_on_where_the_pieces_end(pieces: list[str], stops: list[str]) -> None:
    """Piece by piece the first match to *complete* wins; letter by letter that is unambiguous."""
    text = "".join(pieces)
    shown, stopped = filtered(list(text), stops)
    assert stopped == cut(text, stops)[1]
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not stopped:
        assert shown == text


def test_text_that_begins_a_stop_string_is_held_back_and_no_more() -> None:
    passes = StopFilter(["end."])
    assert passes.push("the en") == "the "
    assert passes.push("ding") == "ending"
    assert passes.push("en") == ""
    assert passes.flush() == "en"
    assert passes.push("end. more") == ""
    assert passes.stopped
    assert passes.push("more") == ""
