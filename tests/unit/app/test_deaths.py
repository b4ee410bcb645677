from __future__ import annotations

import pytest

from app.fleet.deaths import REMEMBERED_SECONDS, WINDOW_SECONDS, Deaths, Fate
from app.fleet.liveness import SUSPICION_SECONDS, ReplicaKey

KEY = ReplicaKey("pod-0", "life", 3)


@pytest.mark.parametrize(
    ("died_at", "fate"),
    [
        (9.9, Fate.DIED),
        (10.0, Fate.DIED),
        (10.0 + WINDOW_SECONDS, Fate.DIED),
        (10.1 + WINDOW_SECONDS, Fate.LIVED),
    ],
)
def test_a_watch_that_ended_about_then_tells_of_a_death(died_at: float, fate: Fate) -> None:
    deaths = Deaths()
    deaths.add(KEY, died_at)
    assert deaths.fate(KEY, 10.0, line_at=9.0, connected=False) is fate


@pytest.mark.parametrize(
    ("line_at", "connected", "fate"),
    [
        (9.0, True, Fate.OPEN),
        (10.0 + SUSPICION_SECONDS / 2, True, Fate.OPEN),
        (10.0 + SUSPICION_SECONDS, True, Fate.LIVED),
        (9.0, False, Fate.LIVED),  # it left as it had said it would
    ],
)
def test_otherwise_its_lines_tell(line_at: float, connected: bool, fate: Fate) -> None:
    assert Deaths().fate(KEY, 10.0, line_at=line_at, connected=connected) is fate


def test_another_promotion_is_another_engine() -> None:
    deaths = Deaths()
    deaths.add(KEY, 10.0)
    assert deaths.fate(KEY._replace(epoch=4), 10.0, line_at=9.0, connected=True) is Fate.OPEN


def test_deaths_are_forgotten() -> None:
    deaths = Deaths()
    deaths.add(KEY, 10.0)
    deaths.add(KEY._replace(epoch=4), 10.0 + REMEMBERED_SECONDS)
    assert list(deaths._at) == [KEY._replace(epoch=4)]
