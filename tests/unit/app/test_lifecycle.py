from __future__ import annotations

from itertools import product

import pytest

from app.lifecycle import TRANSITIONS, IllegalTransition, Lifecycle, LifecycleEvent, LifecycleMachine

PATHS = {
    Lifecycle.STARTING: [],
    Lifecycle.READY: [LifecycleEvent.DISCOVERED],
    Lifecycle.DRAINING: [LifecycleEvent.DRAIN],
    Lifecycle.STOPPING: [LifecycleEvent.DRAIN, LifecycleEvent.DRAINED],
    Lifecycle.STOPPED: [LifecycleEvent.DRAIN, LifecycleEvent.DRAINED, LifecycleEvent.CLOSED],
}
EXPECTED = {
    Lifecycle.STARTING: {"discovered": "ready", "drain": "draining"},
    Lifecycle.READY: {"drain": "draining"},
    Lifecycle.DRAINING: {"discovered": "draining", "drained": "stopping"},
    Lifecycle.STOPPING: {"closed": "stopped"},
    Lifecycle.STOPPED: {},
}


def machine_in(state: Lifecycle) -> LifecycleMachine:
    machine = LifecycleMachine()
    for event in PATHS[state]:
        machine.fire(event)
    assert machine.state is state
    return machine


@pytest.mark.parametrize(("state", "event"), list(product(Lifecycle, LifecycleEvent)))
def test_every_cell(state: Lifecycle, event: LifecycleEvent) -> None:
    machine = machine_in(state)
    expected = EXPECTED[state].get(event.value)
    if expected is None:
        with pytest.raises(IllegalTransition, match=event.value):
            machine.fire(event)
        assert machine.state is state
    else:
        assert machine.fire(event).value == expected
        assert machine.state.value == expected


def test_the_table_has_no_cell_that_is_not_tested() -> None:
    assert len(TRANSITIONS) == sum(len(cells) for cells in EXPECTED.values())


@pytest.mark.parametrize(
    ("state", "admits", "live"),
    [
        (Lifecycle.STARTING, True, True),
        (Lifecycle.READY, True, True),
        (Lifecycle.DRAINING, False, True),
        (Lifecycle.STOPPING, False, False),
        (Lifecycle.STOPPED, False, False),
    ],
)
def test_what_follows_from_a_state(state: Lifecycle, admits: bool, live: bool) -> None:
    machine = machine_in(state)
    assert (machine.admits, machine.live) == (admits, live)


def test_changes_are_told_and_repetitions_are_not() -> None:
    told: list[Lifecycle] = []
    machine = LifecycleMachine(told.append)
    machine.fire(LifecycleEvent.DRAIN)
    machine.fire(LifecycleEvent.DISCOVERED)
    assert told == [Lifecycle.DRAINING]
