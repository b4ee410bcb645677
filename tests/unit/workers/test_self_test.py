from __future__ import annotations

import pytest

from workers.self_test import SelfTests


@pytest.fixture
def tests() -> SelfTests:
    return SelfTests(interval_seconds=30, timeout_seconds=10)


def test_an_engine_that_has_not_tested_itself_is_no_spare(tests: SelfTests) -> None:
    report = tests.report(now=0)
    assert (report.ok, report.age_seconds, report.problem) == (False, None, "it has not tested itself yet")


def test_a_passed_test_counts_for_two_intervals_and_its_own_time(tests: SelfTests) -> None:
    tests.passed(now=100, took=0.1)
    assert tests.report(now=170).ok
    late = tests.report(now=170.1)
    assert (late.ok, late.problem) == (False, "its last self-test that was passed is 70 s ago")
    tests.passed(now=171, took=0.2)
    report = tests.report(now=172)
    assert (report.ok, report.age_seconds, report.passed, report.took_seconds) == (True, 1, 2, 0.2)


def test_one_that_failed_once_is_not_trusted_again_and_the_first_reason_stays(tests: SelfTests) -> None:
    tests.failed("a")
    tests.failed("b")
    tests.passed(now=1, took=0)
    report = tests.report(now=1)
    assert (report.ok, report.problem) == (False, "a")


def test_where_nobody_tests_nothing_is_too_old() -> None:
    assert SelfTests(interval_seconds=0, timeout_seconds=10).report(now=1e6).ok
