"""Sentences of ``up`` that depend on what happened."""

from __future__ import annotations

import pytest

from app.cli.loglines import cut_off_in
from app.cli.up import cut_off_words, spares_line


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("12:00:00.123 warning  drain time is over: ended 1 requests", 1),
        ("12:00:00.123 warning  drain time is over: ended 12 requests", 12),
        ('{"level": "warning", "logger": "app.server", "message": "drain time is over: ended 1 request"}', 1),
        ("12:00:00.123 info  drained", 0),
    ],
)
def test_the_gateways_log_says_how_many_requests_were_cut_off(line: str, count: int) -> None:
    assert cut_off_in(line) == count


def test_what_was_cut_off() -> None:
    assert cut_off_words(0, in_time=True) == ", nothing was cut off"
    assert cut_off_words(1, in_time=False) == ", 1 request was cut off"
    assert cut_off_words(2, in_time=False) == ", 2 requests were cut off"
    assert cut_off_words(0, in_time=False) == "", "the log may have been told to leave it out"


def test_redundancy() -> None:
    assert spares_line(parked=1, wanted=1, bare=False) == "redundancy stands: the spare is parked"
    assert spares_line(parked=2, wanted=2, bare=False) == "redundancy stands: all 2 spares are parked"
    assert spares_line(parked=0, wanted=1, bare=True).startswith("the spare is still being parked, ")
    assert spares_line(parked=1, wanted=2, bare=False) == "1 of 2 spares are still being parked, a line will tell"
    assert spares_line(parked=1, wanted=3, bare=True).startswith("2 of 3 spares are still being parked, ")
