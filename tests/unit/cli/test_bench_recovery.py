"""Which arms ``hotspare bench recovery`` runs, and what its report says of the kills."""

from __future__ import annotations

import pytest

from app.cli.bench.recovery.arms import ARMS, CARRY_OVER, chosen
from app.cli.bench.recovery.command import table
from app.cli.bench.recovery.figures import Asked, Done, Round, figures, spread, summarise, timeline


def _round(recovery: float, *, killed: float = 100.0, **more: float) -> Round:
    phases = {"teardown": recovery / 2, "detect": -0.001}
    return Round(killed=killed, recovery=recovery, phases=phases, redundancy=4.0, **more)


def _done(name: str, load: str, rounds: list[Round], **more: object) -> Done:
    made = {"requests": 10, "failed_requests": 0, "problems": [], "load_average": (0.5, 1.0)} | more
    return Done(arm=ARMS[name], load=load, rounds=rounds, **made)  # type: ignore[arg-type]


def test_only_arms_that_can_be_run_are_and_the_others_say_why() -> None:
    arms, skipped = chosen(list(ARMS), engine="sim", known_variables=frozenset())
    assert [arm.name for arm in arms] == ["cold", "cold_gms", "keeper", "shadow"]
    assert set(skipped) == {"stock", "shadow_carry"}
    assert all(arm.env == () for arm in arms)
    arms, skipped = chosen(list(ARMS), engine="vllm", known_variables=frozenset({CARRY_OVER}))
    assert (len(arms), skipped) == (6, {})
    assert {arm.name: dict(arm.env) for arm in arms if arm.spare} == {
        "shadow": {CARRY_OVER: "false"},
        "shadow_carry": {CARRY_OVER: "true"},
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([float(number) for number in range(50, 0, -1)], (25.5, 50.0, 50.0)),
        ([float(number) for number in range(1, 201)], (100.5, 198.0, 200.0)),
        ([None, 2.0, None, 1.0], (1.5, 2.0, 2.0)),
    ],
)
def test_a_percentile_is_a_value_that_was_seen(
    values: list[float | None], expected: tuple[float, float, float]
) -> None:
    found = spread(values)
    assert found is not None
    assert (found["median"], found["p99"], found["max"]) == expected


def test_without_values_there_is_no_spread() -> None:
    assert spread([None]) is None


def test_an_arm_reports_the_ratio_of_each_pair_of_first_tokens() -> None:
    rounds = [
        _round(1.0, ttft_warm=0.1, ttft_repeat=0.4),
        _round(1.0, ttft_warm=0.2, ttft_repeat=0.2),
        _round(1.0, ttft_warm=0.4, ttft_repeat=0.5),
    ]
    assert figures(_done("shadow", "none", rounds))["ttft_repeat_ratio"] == 1.25
    assert "ttft_repeat_ratio" not in figures(_done("shadow", "none", [_round(1.0)]))


def test_a_timeline_shows_the_median_kill_up_to_the_next_one() -> None:
    rounds = [_round(9.0, killed=100.0), _round(0.5, killed=120.0), _round(0.1, killed=123.5)]
    asked = [
        Asked(sent=113.0, tokens=[114.9]),  # six seconds before: not shown
        Asked(sent=117.25, tokens=[118.0, 119.5]),
        Asked(sent=119.9, tokens=[120.75, 121.0, 122.0, 122.5]),
        Asked(sent=122.75, tokens=[123.0, 200.0]),
        Asked(sent=122.8, tokens=[]),
    ]
    shown = timeline(rounds, asked)
    assert shown["recovery"] == 0.5
    assert shown["tokens"] == [[-5, 0], [-4, 0], [-3, 0], [-2, 1], [-1, 1], [0, 1], [1, 1], [2, 2]]
    assert shown["ttft"] == [[-2.75, 0.75], [-0.1, 0.85], [2.75, 0.25]]


def test_the_report_has_the_ratios_and_counts_failures_of_ours_alone() -> None:
    report = summarise(
        "vllm",
        [
            _done("stock", "none", [_round(30.0)], failed_requests=7, problems=["0: refused"]),
            _done("cold", "none", [_round(20.0)]),
            _done("shadow", "none", [_round(0.25), _round(0.25), _round(0.5)], failed_requests=2, problems=["502: x"]),
            _done("shadow", "streams", [_round(0.75)], asked=[Asked(sent=99.0, tokens=[99.5, 110.0])]),
        ],
        {"keeper": "why not"},
        {"cold_gms": "it was gone"},
    )
    assert (report["stock_ratio"], report["ratio"], report["p99_ratio"]) == (120.0, 80.0, 2.0)
    assert (report["failed_requests"], report["problems"]) == (2, ["502: x"])
    assert (report["requests"], report["rounds"]) == (30, 3)
    assert report["recovery_seconds"]["median"] == 0.25
    assert report["arms"]["shadow"]["streams"]["recovery_seconds"]["max"] == 0.75
    assert report["arms"]["stock"]["none"]["failed_requests"] == 7
    shown = "\n".join(table(report))
    assert "| SIGKILL → first answer or token | 30.00 s / 30.00 s | 20.00 s / 20.00 s | 250.0 ms / 500.0 ms |" in shown
    assert "load: streams" in shown
    assert "keeper was left out: why not" in shown
    assert "cold_gms was given up: it was gone" in shown
