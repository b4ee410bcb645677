from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.liveness import (
    FAST_RECONNECT_SECONDS,
    ReplicaFacts,
    ReplicaKey,
    WatchFacts,
    WorkerState,
    clears_suspicion,
    derive_state,
    reconnect_delay,
    routable_keys,
)
from workers.contract import Role


@pytest.mark.parametrize(
    ("facts", "now", "expected"),
    [
        (WatchFacts(True, 100.0), 100.0, WorkerState.UP),
        (WatchFacts(True, 100.0), 103.4, WorkerState.UP),
        (WatchFacts(True, 100.0), 103.5, WorkerState.SUSPECT),
        (WatchFacts(True, 100.0, suspected_at=100.0), 100.0, WorkerState.SUSPECT),
        (WatchFacts(False, 100.0), 100.0, WorkerState.DOWN),
        (WatchFacts(False, 100.0, suspected_at=100.0), 200.0, WorkerState.DOWN),
    ],
)
def test_states(facts: WatchFacts, now: float, expected: WorkerState) -> None:
    assert derive_state(facts, now=now, heartbeat_timeout=3.5) is expected


def test_a_line_that_may_have_been_on_its_way_clears_nothing() -> None:
    assert not clears_suspicion(100.0, 100.1)
    assert clears_suspicion(100.0, 100.25)


def replica(epoch: int, state: str = "UP", reported: Role = Role.ACTIVE, instance: str = "i") -> ReplicaFacts:
    return ReplicaFacts(ReplicaKey("w", instance, epoch), WorkerState(state), reported)


def routable(*replicas: ReplicaFacts) -> list[tuple[str, int]]:
    return sorted((key.instance, key.epoch) for key in routable_keys(replicas))


@pytest.mark.parametrize("state", WorkerState)
@pytest.mark.parametrize("reported", Role)
def test_only_an_active_worker_that_is_up_routes(state: WorkerState, reported: Role) -> None:
    expected = state is WorkerState.UP and reported is Role.ACTIVE
    assert bool(routable(replica(1, state.value, reported))) is expected


def test_the_highest_epoch_of_an_instance_routes() -> None:
    assert routable(replica(7), replica(8)) == [("i", 8)]
    assert routable(replica(7, reported=Role.HANDOVER), replica(8)) == [("i", 8)]


def test_an_old_epoch_does_not_route_again_when_the_new_one_falters() -> None:
    assert routable(replica(7), replica(8, "SUSPECT")) == []


def test_instances_are_compared_with_themselves_only() -> None:
    assert routable(replica(7, instance="a"), replica(2, instance="b")) == [("a", 7), ("b", 2)]


@given(
    st.lists(st.builds(replica, st.integers(1, 3), st.sampled_from(["UP", "SUSPECT", "DOWN"]), st.sampled_from(Role)))
)
def test_at_most_one_epoch_of_an_instance(replicas: list[ReplicaFacts]) -> None:
    assert len({key.epoch for key in routable_keys(replicas)}) <= 1


@pytest.mark.parametrize(("down_for", "expected"), [(0, 0.025), (9.9, 0.025), (10, 0.025), (15, 0.25), (3600, 0.25)])
def test_reconnect(down_for: float, expected: float) -> None:
    assert reconnect_delay(down_for, 0.5) == pytest.approx(expected)
    assert reconnect_delay(down_for, 0.0) == pytest.approx(expected * 0.8)
    assert reconnect_delay(down_for, 1.0) == pytest.approx(expected * 1.2)


@given(st.floats(0, 1e6), st.floats(0, 1))
def test_reconnect_is_bounded(down_for: float, fraction: float) -> None:
    delay = reconnect_delay(down_for, fraction)
    assert 0.019 <= delay <= 0.301
    if down_for < FAST_RECONNECT_SECONDS:
        assert delay <= 0.031
