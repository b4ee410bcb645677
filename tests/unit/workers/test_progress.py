from __future__ import annotations

from collections.abc import Mapping

import pytest

from workers.progress import LATE_SECONDS, TokenProgress


class Looks:
    """``observe``, every two seconds, where nobody gives up unless it is said."""

    def __init__(self, *, timeout: float = 30, interval: float = 2) -> None:
        self.progress = TokenProgress(timeout_seconds=timeout, interval_seconds=interval)

    def __call__(self, marks: Mapping[str, int], *, now: float, aborted: Mapping[str, int] | None = None) -> str | None:
        return self.progress.observe(marks, aborted=aborted or {}, now=now)


@pytest.fixture
def look() -> Looks:
    return Looks()


def test_requests_that_get_on_are_no_reason(look: Looks) -> None:
    assert not any(look({"a": now, "b": 7}, now=now) for now in range(0, 200, 2))


def test_requests_that_are_computed_again_and_again_do_not_get_on(look: Looks) -> None:
    marks = [0, 40, 80, 0, 40, 80] * 20
    said = [look({"a": mark}, now=2 * at) for at, mark in enumerate(marks)]
    first = next(at for at, problem in enumerate(said) if problem)
    assert 2 * first == 4 + 30 + 2  # the furthest was seen at 4
    assert said[first] == "none of its 1 requests has got a token further for 32 s"


def test_new_requests_hide_nothing_and_those_that_were_answered_count(look: Looks) -> None:
    said = [look({str(number): 0 for number in range(at + 1)}, now=2 * at) for at in range(20)]
    assert said[-1]
    assert look({"1": 0}, now=40) is None


def test_clients_that_give_up_are_no_progress(look: Looks) -> None:
    """One leaves at each look, and another comes: nobody gets a token."""
    said = [look({str(at): 5, str(at + 1): 5}, aborted={str(at - 1): 5}, now=2 * at) for at in range(20)]
    assert said[16:] == [
        f"none of its 2 requests has got a token further for {seconds} s" for seconds in (32, 34, 36, 38)
    ]


def test_what_got_on_before_its_client_left_counts(look: Looks) -> None:
    """Answers that end at a stop string are found by the client's side, and end in the engine as if aborted."""
    said = [look({str(at): 5}, aborted={str(at - 1): 9, "between two looks": 1}, now=2 * at) for at in range(200)]
    assert not any(said)


def test_an_idle_engine_owes_nothing(look: Looks) -> None:
    assert look({"a": 1}, now=0) is None
    assert look({}, now=8) is None
    assert look({"b": 0}, now=1000) is None
    assert look({"b": 0}, now=1008) is None


def test_a_suspended_machine_is_no_fault_of_its_requests(look: Looks) -> None:
    assert look({"a": 1}, now=0) is None
    said = [look({"a": 1}, now=3600 + after) for after in range(0, 15, 5)]
    assert said == [None] * 3  # the time until a late look counts
    assert look({"a": 1}, now=3600 + 31 - 2 - LATE_SECONDS)


@pytest.mark.parametrize("interval", [2, 30, 60, 300])
def test_who_looks_seldom_finds_it_at_the_first_look_after_the_time(interval: float) -> None:
    look = Looks(timeout=300, interval=interval)
    found = next(number for number in range(1000) if look({"a": 5}, now=number * interval))
    assert 300 < found * interval <= 300 + interval
