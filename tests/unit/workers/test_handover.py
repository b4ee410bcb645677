"""Every stage and happening of a hand-over; what a spare answers, and how long a promotion may take in one."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from workers.contract import Role
from workers.handover import (
    ENDS,
    GONE,
    SLACK_SECONDS,
    STAGES,
    Asked,
    Budget,
    Expectation,
    Handover,
    Happening,
    IllegalHappening,
    Offer,
    SpareFacts,
    Stage,
    budget,
    refusal,
)

OFFER = Offer(instance="i", engine="a", epoch=3, quiesce_seconds=5)
SPARE = SpareFacts(instance="i", role=Role.STANDBY, leaving=False, in_line=True)


@pytest.mark.parametrize(("stage", "happening"), list(itertools.product(Stage, Happening)))
def test_each_cell(stage: Stage, happening: Happening) -> None:
    handover = Handover()
    handover.stage = stage
    if (stage, happening) in STAGES:
        assert handover.happened(happening) is STAGES[stage, happening]
        assert handover.over is (handover.stage in ENDS)
    else:
        with pytest.raises(IllegalHappening):
            handover.happened(happening)
        assert handover.stage is stage


def test_each_stage_that_asks_something_can_fail_and_each_end_is_one() -> None:
    assert {stage for stage, happening in STAGES if happening is Happening.FAILED} == set(Stage) - ENDS
    assert not {stage for stage, _ in STAGES} & ENDS


def test_streams_end_only_when_another_engine_serves_or_none_can() -> None:
    """Whatever happens, a hand-over that is not acknowledged comes back to this engine, or is lost."""
    handover = Handover()
    way = (Happening.ACCEPTED, Happening.QUIESCED, Happening.FAILED, Happening.GRANTED, Happening.RESTORED)
    for happening in (Happening.SETTLED, *way):
        assert not handover.over
        handover.happened(happening, "why" if happening is Happening.FAILED else "")
    assert (handover.stage, handover.reason) == (Stage.TAKEN_BACK, "why")


def test_the_first_reason_is_kept() -> None:
    handover = Handover()
    handover.happened(Happening.SETTLED)
    for happening, reason in ((Happening.ACCEPTED, ""), (Happening.QUIESCED, ""), (Happening.FAILED, "first")):
        handover.happened(happening, reason)
    handover.happened(Happening.FAILED, "second")
    assert (handover.stage, handover.reason) == (Stage.LOST, "first")


@pytest.mark.parametrize("role", Role)
def test_only_a_parked_engine_takes_over(role: Role) -> None:
    said = refusal(OFFER, msgspec.structs.replace(SPARE, role=role))
    assert (said == "") is (role is Role.STANDBY)
    assert not said or role in said


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"instance": "j"}, "another life"),
        ({"leaving": True}, "told to stop"),
        ({"unfit": "it is stale"}, "stale"),
        ({"in_line": False, "obstacle": "no memory"}, "no memory"),
        ({"in_line": False}, "only just"),
    ],
)
def test_a_spare_that_would_not_do_says_why(changed: dict[str, object], says: str) -> None:
    assert says in refusal(OFFER, msgspec.structs.replace(SPARE, **changed))


def test_a_spare_that_failed_once_and_stands_in_line_again_takes_over() -> None:
    assert not refusal(OFFER, msgspec.structs.replace(SPARE, obstacle="no memory, an hour ago"))


def test_a_request_that_comes_too_late_to_be_waited_for_is_waited_for_again() -> None:
    handover = Handover()
    for happening in (Happening.SETTLED, Happening.ACCEPTED, Happening.UNSETTLED):
        handover.happened(happening)
    assert (handover.stage, handover.over) == (Stage.SETTLING, False)


def test_a_promotion_is_late_only_for_somebody_who_waits_no_more() -> None:
    expectation = Expectation()
    expectation.granted(now=1.0)
    expectation.cancel()
    assert not expectation.late  # after a death: nobody had waited
    expectation.over()
    expectation.accept(OFFER, now=10.0)
    expectation.granted(now=12.0)
    assert not expectation.late
    expectation.cancel()
    assert expectation.late
    expectation.over()
    assert not expectation.late


def test_a_lock_that_comes_too_late_is_of_a_death() -> None:
    expectation = Expectation()
    expectation.accept(OFFER, now=10.0)
    expectation.granted(now=10.0 + OFFER.quiesce_seconds + SLACK_SECONDS + 0.1)
    expectation.cancel()
    assert not expectation.late


def test_a_cancelled_hand_over_stops_no_later_promotion() -> None:
    expectation = Expectation()
    expectation.accept(OFFER, now=20.0)
    expectation.cancel()
    expectation.granted(now=21.0)  # the other engine has gone on, and then died
    assert not expectation.late


def test_one_that_is_told_to_stop_leaves_time_for_requests_should_it_come_to_nothing() -> None:
    times = budget(began=103.0, asked=None, told_at=100.0, shutdown_seconds=40, step_seconds=5)
    assert times == Budget(settle_until=130.0, step_seconds=5, end=140.0)
    assert [times.step(now=now) for now in (103.0, 130.0, 150.0)] == [5, 2, 0.1]


def test_with_much_time_requests_are_waited_for_almost_to_its_end() -> None:
    assert budget(began=0.0, asked=None, told_at=0.0, shutdown_seconds=900, step_seconds=5).settle_until == 875


def test_one_that_changes_places_only_has_its_whole_time_for_each_step() -> None:
    times = budget(began=100.0, asked=Asked(), told_at=None, shutdown_seconds=900, step_seconds=5)
    assert (times.settle_until, times.step(now=10_000.0), times.cut) == (130.0, 5, False)


def test_one_that_is_told_to_stop_while_it_waits_has_no_more_time_than_if_it_had_been_told_at_first() -> None:
    asked = Asked(wait_seconds=3600)
    told = budget(began=100.0, asked=asked, told_at=107.0, shutdown_seconds=40, step_seconds=5)
    assert told == budget(began=107.0, asked=None, told_at=107.0, shutdown_seconds=40, step_seconds=5)
    assert (told.cut, told.off) == (True, "")
    waits = budget(began=100.0, asked=asked, told_at=107.0, shutdown_seconds=40, step_seconds=5, waits=True)
    assert "told to stop" in waits.off


def test_one_that_nobody_waits_for_is_called_off_unless_the_engine_has_to_leave() -> None:
    times = {"began": 100.0, "shutdown_seconds": 40.0, "step_seconds": 5.0}
    assert budget(**times, asked=Asked(), told_at=None, gone=True).off == GONE
    assert not budget(**times, asked=Asked(), told_at=101.0, gone=True).off


def test_whoever_asks_says_how_long_requests_are_waited_for_and_what_becomes_of_them() -> None:
    asked = Asked(wait_seconds=7, cut=True)
    times = budget(began=100.0, asked=asked, told_at=None, shutdown_seconds=900, step_seconds=5)
    assert (times.settle_until, times.cut) == (107.0, True)


def test_a_wake_may_go_on_for_less_than_the_other_engine_waits_for_the_lock() -> None:
    expectation = Expectation()
    expectation.accept(OFFER, now=10.0)
    assert OFFER.quiesce_seconds < expectation.patience_seconds < 2 * OFFER.quiesce_seconds
