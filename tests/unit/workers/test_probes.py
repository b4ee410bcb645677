from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.probes import Backoff, CrashLoop, Decision, Liveness, LivenessVerdict, Sighting, Threshold, Verdict

RESTART, GIVE_UP = Decision.RESTART, Decision.GIVE_UP


def run(threshold: Threshold, results: str) -> str:
    """Feed ``+`` and ``-``; get back ``+`` for healthy and ``-`` for not, one a result."""
    return "".join("+" if threshold.observe(result == "+") else "-" for result in results)


@pytest.mark.parametrize(
    ("success", "failure", "healthy", "results", "expected"),
    [
        (1, 1, False, "+-+-", "+-+-"),
        (1, 3, True, "---", "++-"),
        (1, 3, True, "--+--+--+", "+++++++++"),
        (1, 3, True, "-----+", "++---+"),
        (2, 1, False, "+-++-", "---+-"),
        (3, 2, False, "+++--+++", "--++---+"),
        (2, 2, False, "-----", "-----"),
    ],
)
def test_threshold_changes_only_after_enough_results_in_a_row(
    success: int, failure: int, healthy: bool, results: str, expected: str
) -> None:
    assert run(Threshold(success=success, failure=failure, healthy=healthy), results) == expected


@given(st.text(alphabet="+-", max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_threshold_agrees_with_looking_back(results: str, success: int, failure: int) -> None:
    threshold = Threshold(success=success, failure=failure)
    healthy = False
    for seen in range(1, len(results) + 1):
        if results[:seen].endswith("+" * success):
            healthy = True
        elif results[:seen].endswith("-" * failure):
            healthy = False
        assert threshold.observe(results[seen - 1] == "+") is healthy


@pytest.mark.parametrize("wrong", [{"success": 0}, {"failure": 0}])
def test_threshold_refuses_to_count_to_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Threshold(**wrong)


def liveness() -> Liveness:
    return Liveness(started=100.0, startup_seconds=10.0, failures=3)


KEEP, SILENT, NEVER = LivenessVerdict.KEEP, LivenessVerdict.KILL_SILENT, LivenessVerdict.KILL_NEVER_STARTED
FAILED = Sighting(ok=False)
REFUSED = Sighting(ok=False, refused=True)


def alive(pid: int = 0, *, initialising: bool = False) -> Sighting:
    return Sighting(ok=True, pid=pid, initialising=initialising)


def test_liveness_failures_do_not_count_before_the_first_answer() -> None:
    probe = liveness()
    assert [probe.observe(FAILED, now=100.0 + at) for at in range(10)] == [KEEP] * 10
    assert not probe.answered


def test_liveness_kills_what_never_started() -> None:
    assert liveness().observe(FAILED, now=109.999) is KEEP
    assert liveness().observe(FAILED, now=110.0) is NEVER
    probe = liveness()
    assert [probe.observe(REFUSED, now=now) for now in (101.0, 109.0, 110.0)] == [KEEP, KEEP, NEVER]


def test_liveness_takes_a_late_first_answer() -> None:
    probe = liveness()
    assert probe.observe(alive(), now=500.0) is KEEP
    assert probe.answered


def test_liveness_kills_what_fell_silent() -> None:
    probe = liveness()
    probe.observe(alive(), now=101.0)
    results = (FAILED, FAILED, alive(), FAILED, FAILED, FAILED)
    assert [probe.observe(seen, now=102.0) for seen in results] == [KEEP] * 5 + [SILENT]


def test_liveness_after_an_answer_does_not_ask_for_the_start_up_time() -> None:
    probe = liveness()
    probe.observe(alive(), now=101.0)
    assert probe.observe(FAILED, now=1000.0) is KEEP


def test_an_engine_that_loads_its_weights_may_be_silent_although_it_answered_before() -> None:
    probe = liveness()
    probe.observe(alive(7, initialising=True), now=101.0)
    assert [probe.observe(FAILED, now=102.0 + at) for at in range(7)] == [KEEP] * 7
    probe.observe(alive(7), now=109.0)
    assert [probe.observe(FAILED, now=109.5) for _ in range(3)] == [KEEP, KEEP, SILENT]


def test_initialising_is_no_excuse_after_the_start_up_time() -> None:
    probe = liveness()
    probe.observe(alive(7, initialising=True), now=101.0)
    assert [probe.observe(FAILED, now=110.0) for _ in range(3)] == [KEEP, KEEP, SILENT]


def test_an_engine_that_was_initialised_once_does_not_initialise_again() -> None:
    probe = liveness()
    probe.observe(alive(7), now=101.0)
    probe.observe(alive(7, initialising=True), now=101.5)
    assert [probe.observe(FAILED, now=102.0) for _ in range(3)] == [KEEP, KEEP, SILENT]


def test_another_engine_behind_the_same_keeper_gets_its_own_start_up_time() -> None:
    probe = liveness()
    probe.observe(alive(7), now=101.0)
    probe.observe(FAILED, now=200.0)
    probe.observe(alive(8, initialising=True), now=201.0)
    assert [probe.observe(FAILED, now=202.0 + at) for at in range(9)] == [KEEP] * 9
    assert [probe.observe(FAILED, now=211.0) for _ in range(3)] == [KEEP, KEEP, SILENT]


def test_a_port_that_refuses_while_the_keeper_lives_is_a_fork_to_come() -> None:
    probe = liveness()
    probe.observe(alive(7), now=101.0)
    assert [probe.observe(REFUSED, now=200.0 + at) for at in range(10)] == [KEEP] * 10
    assert probe.observe(REFUSED, now=210.0) is NEVER


def test_a_keeper_that_forks_nothing_is_not_waited_for() -> None:
    stuck = Sighting(ok=False, refused=True, stuck=True)
    probe = liveness()
    probe.observe(alive(7), now=101.0)
    assert [probe.observe(seen, now=200.0) for seen in (stuck, REFUSED, stuck, stuck)] == [KEEP, KEEP, KEEP, SILENT]


def test_the_next_fork_is_not_waited_for_as_long_as_a_start() -> None:
    probe = Liveness(started=100.0, startup_seconds=600.0, failures=3)
    probe.observe(alive(7), now=101.0)
    assert [probe.observe(REFUSED, now=now) for now in (200.0, 259.0, 260.0)] == [KEEP, KEEP, NEVER]
    probe = Liveness(started=100.0, startup_seconds=600.0, failures=3)
    probe.observe(alive(7), now=101.0)
    probe.observe(REFUSED, now=200.0)
    probe.observe(alive(8, initialising=True), now=201.0)
    assert [probe.observe(FAILED, now=now) for now in (202.0, 400.0, 800.0)] == [KEEP] * 3


def test_a_port_that_refuses_without_a_keeper_is_a_failure_like_any_other() -> None:
    probe = liveness()
    probe.observe(alive(7), now=101.0)
    assert [probe.observe(FAILED, now=102.0) for _ in range(3)] == [KEEP, KEEP, SILENT]


def backoff() -> Backoff:
    return Backoff(initial_seconds=1.0, maximum_seconds=10.0, reset_seconds=60.0)


def test_backoff_first_at_once_then_doubling_up_to_the_maximum() -> None:
    waits = backoff()
    assert [waits.died(lived_seconds=0.0) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_backoff_starts_over_after_a_long_life() -> None:
    waits = backoff()
    for _ in range(4):
        waits.died(lived_seconds=59.9)
    assert waits.died(lived_seconds=59.9) == 8.0
    assert waits.died(lived_seconds=60.0) == 0.0
    assert waits.died(lived_seconds=1.0) == 1.0


@pytest.mark.parametrize(("initial", "maximum"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_backoff_refuses_waits_that_make_no_sense(initial: float, maximum: float) -> None:
    with pytest.raises(ValueError, match="initial_seconds"):
        Backoff(initial_seconds=initial, maximum_seconds=maximum, reset_seconds=1.0)


def verdicts(deaths: list[tuple[float, bool]], **limits: Any) -> list[Verdict]:
    """What a crash loop says to deaths: when each was, and whether the engine had reached STANDBY."""
    loop = CrashLoop(**limits)
    return [loop.died(now, reached_standby=standby) for now, standby in deaths]


def decisions(deaths: list[tuple[float, bool]], **limits: Any) -> list[Decision]:
    return [verdict.decision for verdict in verdicts(deaths, **limits)]


def early(*times: float) -> list[tuple[float, bool]]:
    return [(now, False) for now in times]


def test_crash_loop_gives_up_at_the_fifth_early_death_in_the_window() -> None:
    assert decisions(early(0, 1, 2, 3, 4)) == [RESTART] * 4 + [GIVE_UP]


def test_crash_loop_counts_the_whole_window() -> None:
    assert decisions(early(0, 1, 2, 3, 60))[-1] is GIVE_UP
    assert decisions(early(0, 1, 2, 3, 60.001))[-1] is RESTART


def test_crash_loop_window_slides() -> None:
    assert decisions(early(0, 50, 55, 58, 61, 62)) == [RESTART] * 5 + [GIVE_UP]


def test_crash_loop_waits_longer_each_time_and_not_the_first() -> None:
    assert [verdict.delay_seconds for verdict in verdicts(early(0, 1, 2, 3, 4))] == [0.0, 0.5, 1.0, 2.0, 0.0]
    delays = [verdict.delay_seconds for verdict in verdicts(early(*range(8)), limit=100)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]


def test_crash_loop_restarts_at_once_what_died_long_after_the_last_one() -> None:
    assert [verdict.delay_seconds for verdict in verdicts(early(0, 1, 2, 62, 63))] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_crash_loop_restarts_at_once_what_had_been_ready() -> None:
    assert verdicts([(float(at), True) for at in range(50)]) == [Verdict(RESTART)] * 50


def test_crash_loop_forgets_early_deaths_once_the_engine_was_ready() -> None:
    found = verdicts([*early(0, 1, 2, 3), (5.0, True), *early(6, 7, 8, 9, 10)])
    assert [verdict.decision for verdict in found] == [RESTART] * 9 + [GIVE_UP]
    assert [verdict.delay_seconds for verdict in found[4:]] == [0.0, 0.0, 0.5, 1.0, 2.0, 0.0]


def test_crash_loop_with_a_limit_of_one_gives_up_at_once() -> None:
    assert decisions(early(0), limit=1) == [GIVE_UP]


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"window_seconds": 0.0}])
def test_crash_loop_refuses_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="crash loop"):
        CrashLoop(**wrong)


def test_one_that_is_stopped_starts_nothing_however_long_it_may_take() -> None:
    probe = Liveness(started=0.0, startup_seconds=600.0, failures=3)
    stopped = Sighting(ok=False, stopped=True)
    assert [probe.observe(stopped, now=float(now)) for now in range(3)] == [KEEP, KEEP, SILENT]


def test_one_that_was_stopped_for_a_moment_goes_on_starting() -> None:
    probe = Liveness(started=0.0, startup_seconds=600.0, failures=3)
    for now in range(2):
        probe.observe(Sighting(ok=False, stopped=True), now=float(now))
    assert probe.observe(FAILED, now=3.0) is KEEP
    assert probe.observe(alive(7), now=4.0) is KEEP
    assert [probe.observe(FAILED, now=float(now)) for now in (5, 6)] == [KEEP, KEEP]


def quick(*lives: float) -> list[float]:
    """The waits after lives of an engine that each time was ready."""
    loop = CrashLoop()
    return [
        loop.died(float(at), reached_standby=True, lived_seconds=lived).delay_seconds for at, lived in enumerate(lives)
    ]


def test_an_engine_that_dies_at_once_again_and_again_waits_also_after_it_was_ready() -> None:
    assert quick(*[0.3] * 7) == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_one_that_is_killed_every_few_seconds_never_waits() -> None:
    assert quick(*[3.0] * 50) == [0.0] * 50
    assert quick(0.3, 3.0, 0.3, 3.0) == [0.0] * 4
