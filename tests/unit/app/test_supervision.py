from __future__ import annotations

import pytest

from app.processes.supervision import (
    MAX_DELAY_SECONDS,
    QUICK_SECONDS,
    SILENCE_SECONDS,
    START_SECONDS,
    Hearing,
    Restarts,
    exit_code,
    hopeless,
)


def test_who_ends_soon_waits_longer_and_longer() -> None:
    restarts = Restarts()
    assert [restarts.delay(1.0) for _ in range(5)] == [0, 0.25, 0.5, 1, 2]
    assert [restarts.delay(1.0) for _ in range(20)][-1] == MAX_DELAY_SECONDS
    assert restarts.delay(QUICK_SECONDS) == 0
    assert restarts.delay(1.0) == 0


@pytest.mark.parametrize(
    ("code", "failed_starts", "serving", "expected"),
    [
        (1, 5, 0, False),
        (1, 6, 0, True),
        (1, 100, 1, False),
        (2, 1, 0, True),
        (2, 1, 1, False),
        (-9, 6, 0, True),
    ],
)
def test_when_to_give_up(code: int, failed_starts: int, serving: int, expected: bool) -> None:
    assert hopeless(code, failed_starts=failed_starts, places=2, serving=serving) is expected


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([], 0), ([0, 0], 0), ([0, 70], 70), ([1, 70], 70), ([0, -9], 1), ([0, 2, 0], 2)],
)
def test_the_worst_code(codes: list[int], worst: int) -> None:
    assert exit_code(codes) == worst


def test_one_that_says_nothing_hangs() -> None:
    hearing = Hearing(90.0)
    hearing.heard(100.0)
    assert hearing.serves
    assert not hearing.hangs(100.0 + SILENCE_SECONDS - 0.1, woken_late=0.0)
    assert hearing.hangs(hearing.due_at, woken_late=0.1)


def test_one_that_starts_has_longer() -> None:
    hearing = Hearing(100.0)
    assert not hearing.serves
    assert not hearing.hangs(100.0 + START_SECONDS - 0.1, woken_late=0.0)
    assert hearing.hangs(hearing.due_at, woken_late=0.1)


def test_who_was_held_up_itself_kills_nobody() -> None:
    hearing = Hearing(100.0, serves=True)
    late = 100.0 + 100 * SILENCE_SECONDS
    assert not hearing.hangs(late, woken_late=late - hearing.due_at)
    assert hearing.due_at == late + SILENCE_SECONDS
    assert hearing.hangs(hearing.due_at, woken_late=0.0)
