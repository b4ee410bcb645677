"""When a client must hear something, and when a worker has been silent for too long."""

from __future__ import annotations

import math

import pytest

from app.relay.deadlines import (
    DECIDING_SECONDS,
    LONGEST_TIMER_SECONDS,
    WAITING_KEEPALIVE_SECONDS,
    RelayLimits,
    keep_alive_due,
    lost_patience,
    next_look,
)
from app.relay.kept import KeepLimits


def limits(*, first_byte: float = 60, stall: float = 30, keepalive: float = 15) -> RelayLimits:
    return RelayLimits(
        wait_for_worker=15,
        resume_wait=60,
        first_byte=first_byte,
        stall=stall,
        keepalive=keepalive,
        breaks=3,
        resumes=True,
        keep=KeepLimits(),
        max_held_bytes=1,
    )


def due(
    *,
    head_sent: bool = False,
    attempt_since: float | None = None,
    search_since: float = 0.0,
    search_until: float = 0.0,
    now: float = 100.0,
) -> float:
    """For a client that got something last, or came, at 100."""
    return keep_alive_due(
        limits(),
        sent_at=100.0,
        head_sent=head_sent,
        attempt_since=attempt_since,
        search_since=search_since,
        search_until=search_until,
        now=now,
    )


def test_a_keep_alive_each_interval() -> None:
    assert due(attempt_since=100.0) == 115.0
    assert due(attempt_since=100.0, head_sent=True) == 115.0


def test_a_stream_that_waits_for_a_worker_hears_more_often() -> None:
    assert due(head_sent=True, search_since=100.0, search_until=160.0) == 100.0 + WAITING_KEEPALIVE_SECONDS


def test_a_search_that_ends_about_then_is_decided_first() -> None:
    assert due(search_since=100.0, search_until=115.0, now=114.9) == 114.9 + DECIDING_SECONDS
    assert due(search_since=100.0, search_until=130.0, now=114.9) == 115.0


def test_a_worker_that_was_just_asked_may_refuse_first() -> None:
    asked = due(search_since=100.0, search_until=115.0, attempt_since=114.5, now=115.2)
    assert asked == 114.5 + DECIDING_SECONDS
    assert due(search_since=100.0, search_until=115.0, attempt_since=101.0, now=115.2) == 115.0


def test_the_nearest_is_looked_at_next() -> None:
    assert next_look(limits(), 100.0, keep_alive=None, silent=None) == 30.0
    assert next_look(limits(), 100.0, keep_alive=115.0, silent=110.0) == 10.0
    assert next_look(limits(), 100.0, keep_alive=105.0, silent=110.0) == 5.0


def test_what_is_overdue_does_not_make_the_timer_spin() -> None:
    assert next_look(limits(), 100.0, keep_alive=90.0, silent=None) == pytest.approx(0.05)
    assert next_look(limits(stall=0.00001), 100.0, keep_alive=None, silent=90.0) == 0.001


def test_without_limits_it_still_looks_now_and_then() -> None:
    endless = limits(first_byte=math.inf, stall=math.inf)
    assert endless.first_look == LONGEST_TIMER_SECONDS
    assert next_look(endless, 100.0, keep_alive=None, silent=math.inf) == LONGEST_TIMER_SECONDS


def test_the_first_look() -> None:
    assert (limits().first_look, limits().first_look_streaming) == (30, 15)
    assert limits(keepalive=0.001).first_look_streaming == 0.05


def test_the_first_byte_has_a_limit_of_its_own() -> None:
    assert limits().silence(responded=False) == 60
    assert limits().silence(responded=True) == 30


@pytest.mark.parametrize(
    ("overdue", "elsewhere", "left"), [(0, True, True), (0, False, False), (59, False, False), (60, False, True)]
)
def test_a_silent_worker_is_left_at_once_only_for_another(overdue: float, elsewhere: bool, left: bool) -> None:
    assert lost_patience(30, overdue, elsewhere=elsewhere) is left
