"""Parts of a recovery, as a gateway sees them."""

from __future__ import annotations

import pytest

from app.fleet.liveness import WorkerState
from app.fleet.recovery_times import recovery_times

UP, SUSPECT, DOWN = WorkerState.UP, WorkerState.SUSPECT, WorkerState.DOWN


@pytest.mark.parametrize(
    ("states", "detect"),
    [
        ([(UP, 1.0), (SUSPECT, 9.75), (DOWN, 9.8)], 0.25),
        ([(UP, 1.0), (SUSPECT, 3.0), (UP, 4.0), (SUSPECT, 9.75)], 0.25),  # a doubt that had passed
        ([(UP, 1.0), (SUSPECT, 9.25), (DOWN, 9.75)], 0.0),  # its streams broke before its lock was free
        ([(UP, 1.0)], None),
        ([], None),
    ],
)
def test_the_break_is_measured_from_the_lock_on(states: list[tuple[WorkerState, float]], detect: float | None) -> None:
    expected = {"routable": 0.5} if detect is None else {"routable": 0.5, "detect": detect}
    assert recovery_times(states, line_at=10.0, lock_seconds=0.5) == expected


def test_a_worker_that_does_not_say_gives_no_times() -> None:
    assert recovery_times([(DOWN, 1.0)], line_at=2.0, lock_seconds=-1.0) == {}
