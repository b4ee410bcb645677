from __future__ import annotations

import random

import pytest

from app.fleet.room import LAG_SECONDS, LEFT_SECONDS, PAUSE_LIMIT_SECONDS, PAUSE_SECONDS, Room


def room(capacity: int = 4, *, inflight: int = 0, gateways: int = 1) -> Room:
    made = Room()
    heard(made, inflight, capacity=capacity, gateways=gateways)
    return made


def heard(
    it: Room, inflight: int, *, capacity: int = 4, refused: int = 0, gateways: int = 1, now: float = 100.0
) -> None:
    it.heard(inflight=inflight, capacity=capacity, refused=refused, gateways=gateways, now=now)


def filled(it: Room, now: float) -> int:
    """Take all there is."""
    taken = 0
    while it.open(now) and taken < 1000:
        it.take(now)
        taken += 1
    return taken


def test_our_own_count_up_to_capacity() -> None:
    it = room()
    assert filled(it, 100.0) == 4
    assert it.full
    assert it.opens_at(100.0) is None
    it.free(101.0)
    assert filled(it, 101.0) == 1


def test_a_worker_that_does_not_say_is_not_limited() -> None:
    assert filled(room(0), 100.0) == 1000


def test_others_hold_what_is_not_ours() -> None:
    it = room(inflight=3)
    assert filled(it, 100.0) == 1
    heard(it, 4)
    assert not it.open(100.0)
    heard(it, 2)
    assert filled(it, 100.0) == 2


def test_a_line_that_was_written_before_our_request_ended() -> None:
    """It counts that request; nobody else is there."""
    it = room()
    filled(it, 100.0)
    it.free(100.1)
    heard(it, 4, now=100.1 + LAG_SECONDS / 2)
    assert filled(it, 100.2) == 1


def test_after_a_refusal_one_asks_at_a_time() -> None:
    it, now = room(100), 100.0
    pauses = []
    for _ in range(8):
        assert filled(it, now) <= 100
        while it.own:
            it.refused(now)
        assert it.full
        due = it.opens_at(now)
        assert due is not None
        pauses.append(due - now)
        now = due
        it.take(now)
        assert not it.open(now)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (pytest.approx(PAUSE_SECONDS), pytest.approx(PAUSE_LIMIT_SECONDS))
    it.answered()
    it.refused(now + 1)
    assert it.opens_at(now + 1) == pytest.approx(now + 1 + PAUSE_SECONDS)


def test_a_place_of_ours_or_a_line_ends_the_pause() -> None:
    it = room()
    it.take(100.0)
    it.take(100.0)
    it.refused(100.0)
    assert not it.open(100.0)
    it.free(100.01)
    assert filled(it, 100.01) == 1
    heard(it, 3, refused=1)
    assert it.open(100.02)


def test_refusals_of_others_are_owed_to_them() -> None:
    """Two gateways, one holds everything: for each refusal of the other it leaves one place, down to its share."""
    it, now = room(gateways=2), 100.0
    filled(it, now)
    heard(it, 4, refused=9, gateways=2)
    kept = []
    for _ in range(4):
        now += 1
        it.free(now)
        assert it.open(now) == (it.own < 2)
        if not it.open(now):
            assert it.opens_at(now) == pytest.approx(now + LEFT_SECONDS)
            heard(it, 4, refused=9, gateways=2, now=now + LEFT_SECONDS / 2)  # the other one has it
        else:
            it.take(now)
        kept.append(it.own)
    assert kept == [3, 2, 2, 2]


def test_what_is_left_is_taken_back_if_nobody_wants_it() -> None:
    it = room(1, gateways=2)
    filled(it, 100.0)
    heard(it, 1, capacity=1, refused=1, gateways=2)
    it.free(101.0)
    assert not it.open(101.0)
    assert it.open(101.0 + LEFT_SECONDS)


def test_our_own_refusals_are_owed_to_nobody() -> None:
    it = room(gateways=2)
    filled(it, 100.0)
    it.refused(100.0)
    heard(it, 4, refused=1, gateways=2)
    it.free(101.0)
    it.free(101.0)
    assert it.open(101.0)


def test_who_has_less_than_its_share_goes_on_asking() -> None:
    it = room(inflight=4, gateways=2)
    assert it.opens_at(100.0) == pytest.approx(100.0 + PAUSE_LIMIT_SECONDS)
    assert room(inflight=4, gateways=1).opens_at(100.0) is None


def test_two_gateways_at_one_worker_both_get_some() -> None:
    """A model of it: each has always something to send; the worker tells of room 20 ms later and once a second."""
    for capacity in (1, 2, 4, 16):
        served = simulate(capacity, seconds=30.0)
        assert sum(served) > 0.85 * capacity * 30 / 0.2, (capacity, served)
        assert min(served) > 0.25 * max(served), (capacity, served)


def simulate(capacity: int, *, seconds: float) -> tuple[int, int]:
    chance = random.Random(7)
    rooms, served, refused, told_at = [Room(), Room()], [0, 0], 0, 0.0
    running: list[tuple[float, int]] = []
    known_full, news_at = False, 0.0

    def tell(now: float) -> None:
        nonlocal told_at, known_full
        told_at, known_full = now, len(running) >= capacity
        for it in rooms:
            heard(it, len(running), capacity=capacity, refused=refused, gateways=2, now=now)

    tell(1.0)
    for tick in range(1000, int(seconds * 1000)):
        now = tick / 1000
        for ended in [entry for entry in running if entry[0] <= now]:
            running.remove(ended)
            rooms[ended[1]].free(now)
            served[ended[1]] += 1
            if known_full and not news_at:
                news_at = now + 0.02
        if news_at and now >= news_at:
            news_at = 0.0
            if len(running) < capacity:
                tell(now)
        if now - told_at >= 1.0:
            tell(now)
        for who in (0, 1):
            while rooms[who].open(now):
                rooms[who].take(now)
                if len(running) < capacity:
                    running.append((now + 0.2 * chance.uniform(0.5, 1.5), who))
                else:
                    refused += 1
                    known_full = True
                    rooms[who].refused(now)
    return served[0], served[1]
