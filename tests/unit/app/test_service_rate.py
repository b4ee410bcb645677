from __future__ import annotations

import heapq
import random

import pytest

from app.relay.service_rate import LONGEST_SECONDS, SHORTEST_SECONDS, Appointments, ServiceRate


def test_places_times_how_fast_each_is() -> None:
    rate, now = ServiceRate(), 1000.0
    for _ in range(200):  # ten at a time, half a second each
        for _ in range(10):
            rate.began(now)
        now += 0.5
        assert rate.per_second(now) == pytest.approx(20, rel=0.25) or now < 1005
        for _ in range(10):
            rate.ended(now, completed=True)
    assert rate.per_second(now) == 0
    rate.began(now + 500)  # that nobody came for a while does not make it slower
    assert rate.per_second(now + 500) == pytest.approx(2, rel=0.1)


def test_requests_that_hang_make_it_slow() -> None:
    rate = ServiceRate()
    for now in range(100):
        rate.began(now)
        rate.ended(now + 0.5, completed=True)
    rate.began(100)
    assert rate.per_second(100) == pytest.approx(2, rel=0.2)
    assert rate.per_second(160) < 0.5


def test_a_guess_until_something_is_known() -> None:
    rate = ServiceRate()
    rate.began(5.0)
    assert rate.per_second(5.0) == pytest.approx(1)


def test_what_was_turned_away_is_no_completion() -> None:
    rate = ServiceRate()
    for now in range(50):
        rate.began(now)
        rate.ended(now + 0.001, completed=False)
    rate.began(50)
    assert rate.per_second(50) < 1.1


def test_appointments_are_one_after_the_other_and_bounded() -> None:
    diary = Appointments()
    given = [diary.make(10.0, 9.0, 0.5) for _ in range(5)]
    assert given == pytest.approx([n / 8.1 for n in range(1, 6)])
    assert diary.make(10.0, 1e9, 0.0) <= given[-1]
    for _ in range(2000):
        last = diary.make(10.0, 9.0, 1.0)
    assert last == LONGEST_SECONDS
    assert Appointments().make(0.0, 1e6, 0.0) == SHORTEST_SECONDS
    assert Appointments().make(0.0, 0.0, 0.5) == pytest.approx(1)


@pytest.mark.parametrize("clients", [60, 200])
@pytest.mark.parametrize("seconds_each", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("whole_seconds", [False, True], ids=["ms", "s"])
def test_who_obeys_finds_room(clients: int, seconds_each: float, whole_seconds: bool) -> None:
    """Clients that ask again as soon as they are served, 8 places and a line of 16: whoever comes back when he was told
    to gets in, and the places stay busy. Who reads whole seconds comes late, when others have taken what was kept."""
    returns, accepted, utilisation = overload(clients, seconds_each, whole_seconds=whole_seconds)
    assert returns > 20
    assert accepted / returns > (0.15 if whole_seconds else 0.75), (returns, accepted)
    assert utilisation > 0.9


def overload(clients: int, seconds_each: float, *, whole_seconds: bool) -> tuple[int, int, float]:
    """After the first ten rounds: how many came back as told, how many of those got in, how busy the places were."""
    places, line_limit = 8, 16
    chance, rate, diary = random.Random(3), ServiceRate(), Appointments()
    horizon = max(60.0, 200 * seconds_each)
    begin = horizon / 4
    events: list[tuple[float, int, str]] = [(chance.random() * 0.1, n, "new") for n in range(clients)]
    heapq.heapify(events)
    number, busy, line, returns, accepted, spent = clients, 0, 0, 0, 0, 0.0

    def start(now: float) -> None:
        nonlocal busy, number, spent
        busy += 1
        number += 1
        rate.began(now)
        takes = seconds_each * chance.uniform(0.5, 1.5)
        spent += min(takes, horizon - now) if now > begin else 0.0
        heapq.heappush(events, (now + takes, number, "end"))

    while events:
        now, _, kind = heapq.heappop(events)
        if now >= horizon:
            break
        if kind == "end":
            busy -= 1
            rate.ended(now, completed=True)
            number += 1
            heapq.heappush(events, (now + chance.random() * 0.01, number, "new"))
            if line:
                line -= 1
                start(now)
            continue
        got_in = busy < places or diary.admits(now, waiting=line, limit=line_limit)
        if kind == "return" and now > begin:
            returns += 1
            accepted += got_in
        if busy < places:
            start(now)
        elif got_in:
            line += 1
        else:
            wait = diary.make(now, rate.per_second(now), chance.random())
            number += 1
            heapq.heappush(events, (now + (float(-(-wait // 1)) if whole_seconds else wait), number, "return"))
    return returns, accepted, spent / (places * (horizon - begin))
