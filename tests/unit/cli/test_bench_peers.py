"""How ``hotspare bench resume --peers`` calls the ends of streams."""

from __future__ import annotations

import pytest

from app.cli.bench.peers import end_of, summarise
from app.cli.bench.resume import delivered_at
from app.cli.bench.streaming import Streamed

WHOLE = Streamed(text="a b c", at=[1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("got", "how"),
    [
        (Streamed(text="a b c", at=[1.0, 2.0, 3.0]), "whole"),
        (Streamed(text="a b", at=[1.0, 2.0]), "wrong"),
        (Streamed(text="a b", at=[1.0, 2.0], problem="it broke"), "cut"),
        (Streamed(text="a b c", at=[1.0, 2.0, 3.0], problem="it ended without its end"), "cut"),
        (Streamed(text="a", at=[1.0], problem="the worker is gone", told=True), "error"),
    ],
)
def test_how_a_stream_ended(got: Streamed, how: str) -> None:
    ended = end_of(got, WHOLE)
    assert (ended.how, ended.delivered, ended.saying) == (how, len(got.at), got.problem)


def test_a_report_counts_each_end() -> None:
    ended = [end_of(WHOLE, WHOLE), *[end_of(Streamed(text="a", at=[1.0], problem="it broke"), WHOLE)] * 2]
    assert summarise(ended) == {
        "kills": 3,
        "whole": 1,
        "wrong": 0,
        "error": 0,
        "cut": 2,
        "delivered": [3, 1, 1],
        "problems": ["it broke", "it broke"],
    }


@pytest.mark.parametrize(("kills", "expected"), [(1, [32]), (2, [16, 32]), (40, [1, 1, 2, 3])])
def test_kills_are_spread_over_the_answer(kills: int, expected: list[int]) -> None:
    assert [delivered_at(number, kills) for number in range(kills)][: len(expected)] == expected
