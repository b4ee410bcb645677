from __future__ import annotations

import pytest

from app.fleet.bucket import TokenBucket


def taken(bucket: TokenBucket, now: float) -> int:
    count = 0
    while bucket.open(now) and count < 1000:
        bucket.take(now)
        count += 1
    return count


def test_a_second_of_them_at_once_and_then_at_the_rate() -> None:
    bucket = TokenBucket(4)
    assert taken(bucket, 100.0) == 4
    assert not bucket.open(100.2)
    assert bucket.opens_at(100.2) == pytest.approx(100.25)
    assert taken(bucket, 100.3) == 1
    assert sum(taken(bucket, 100.3 + step / 10) for step in range(1, 101)) == 40
    assert taken(bucket, 200.0) == 4


def test_fewer_than_one_a_second() -> None:
    bucket = TokenBucket(0.5)
    assert taken(bucket, 10.0) == 1
    assert not bucket.open(11.9)
    assert bucket.opens_at(10.0) == pytest.approx(12.0)
    assert taken(bucket, 12.0) == 1


def test_no_limit() -> None:
    bucket = TokenBucket(0)
    assert taken(bucket, 1.0) == 1000
    assert bucket.opens_at(1.0) == 1.0


def test_a_clock_that_stands_still_fills_nothing() -> None:
    bucket = TokenBucket(2)
    assert taken(bucket, 5.0) == 2
    assert taken(bucket, 5.0) == 0
    assert bucket.opens_at(5.0) > 5.0
