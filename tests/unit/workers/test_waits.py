"""What is counted as a wait for the memory service, and what that leaves for everything else."""

from __future__ import annotations

import pytest

from workers.waits import Allowance, Waits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_waits_are_told_and_added_up_while_they_last(clock: Clock) -> None:
    waits, told = Waits(clock=clock), []
    waits.tell = told.append
    with waits.waiting():
        clock.now += 2
        assert waits.seconds == 2
    clock.now += 5
    assert waits.seconds == 2

    def wait_in_vain() -> None:
        with waits.waiting():
            clock.now += 1
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        wait_in_vain()
    assert waits.seconds == 3
    assert told == [True, False, True, False]


def test_what_waits_has_its_own_time_left(clock: Clock) -> None:
    waits = Waits(clock=clock)
    with waits.waiting():
        clock.now += 9  # before it begins: nothing of it counts
    allowed = Allowance(seconds=10, wait_seconds=44, waits=waits, clock=clock)
    clock.now += 4
    assert allowed.left == 6
    with waits.waiting():
        clock.now += 40
        assert allowed.left == 6
        assert allowed.waited == 40
        clock.now += 6  # two of them are its own
        assert allowed.left == 4
    clock.now += 4
    assert allowed.left == 0


def test_of_whom_nothing_is_known_all_waits_are_allowed_for(clock: Clock) -> None:
    allowed = Allowance(seconds=10, wait_seconds=44, waits=None, clock=clock)
    clock.now += 53
    assert (allowed.left, allowed.seconds, allowed.waited) == (1, 54, 0)
