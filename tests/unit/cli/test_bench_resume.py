"""What ``hotspare bench resume`` takes for a pause, and its report."""

from __future__ import annotations

import pytest

from app.cli.bench.resume import Kill, pause, summarise


@pytest.mark.parametrize(
    ("at", "killed", "expected"),
    [
        ([1.0, 1.5, 1.6, 2.0], 1.55, 0.4),
        ([1.0, 1.5, 1.6, 2.0], 0.5, 0.5),
        ([1.0, 9.0, 9.25, 9.5], 9.0, 8.0),  # killed as it came
        ([1.0, 9.0, 9.25, 9.5], 9.1, 0.25),
        ([1.0, 2.0], 3.0, 0.0),
        ([], 3.0, 0.0),
    ],
)
def test_a_pause_is_the_longest_silence_that_ends_after_the_kill(
    at: list[float], killed: float, expected: float
) -> None:
    assert pause(at, killed) == pytest.approx(expected)


def _kill(pause: float, *, problem: str = "", wrong: bool = False) -> Kill:
    return Kill(pause=pause, teardown=0.1, prefill=0.25, delivered=4, problem=problem, wrong=wrong)


def test_a_report_counts_lost_answers_and_leaves_their_times_out() -> None:
    report = summarise("sim", [_kill(0.5), _kill(9.0, problem="worker_lost"), _kill(0.75, wrong=True)])
    assert report["pause_seconds"] == {"median": 0.625, "max": 0.75}
    assert report["rest_seconds"] == {"median": pytest.approx(0.275), "max": 0.4}
    assert (report["kills"], report["lost"], report["wrong"]) == (3, 1, 1)
    assert report["problems"] == ["worker_lost"]
    assert summarise("sim", [_kill(9.0, problem="x")])["pause_seconds"] == {"median": None, "max": None}
