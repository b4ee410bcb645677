from __future__ import annotations

from app.telemetry.shortage import CALM_SECONDS, News, Shortage


def test_nothing_is_short() -> None:
    shortage = Shortage()
    assert [shortage.looked(False, now=now) for now in (0.0, 1.0, 1e6)] == [None, None, None]


def test_an_episode_is_told_once_and_ends_when_it_has_been_away_for_a_while() -> None:
    shortage = Shortage()
    assert shortage.looked(True, now=10.0) is News.BEGUN
    assert shortage.looked(True, now=11.0) is None
    assert shortage.looked(False, now=12.0) is None
    assert shortage.looked(True, now=13.0) is None  # it comes and goes
    assert shortage.looked(False, now=13.0 + CALM_SECONDS - 0.1) is None
    assert shortage.looked(False, now=13.0 + CALM_SECONDS) is News.OVER
    assert shortage.looked(False, now=14.0 + CALM_SECONDS) is None
    assert shortage.looked(True, now=15.0 + CALM_SECONDS) is News.BEGUN
