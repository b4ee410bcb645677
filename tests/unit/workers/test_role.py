"""Every cell of the table of an engine's life: each state with each event."""

from __future__ import annotations

import pytest

from workers.role import TRANSITIONS, IllegalTransition, Role, RoleEvent, RoleMachine

PATHS: dict[Role, list[RoleEvent]] = {
    Role.INIT: [],
    Role.STANDBY: [RoleEvent.INITIALIZED],
    Role.PROMOTING: [RoleEvent.INITIALIZED, RoleEvent.LOCK_GRANTED],
    Role.ACTIVE: [RoleEvent.INITIALIZED, RoleEvent.LOCK_GRANTED, RoleEvent.PROMOTED],
    Role.HANDOVER: [
        RoleEvent.INITIALIZED,
        RoleEvent.LOCK_GRANTED,
        RoleEvent.PROMOTED,
        RoleEvent.HANDOVER_STARTED,
    ],
    Role.DRAINING: [RoleEvent.INITIALIZED, RoleEvent.LOCK_GRANTED, RoleEvent.PROMOTED, RoleEvent.DRAIN_STARTED],
    Role.STOPPED: [RoleEvent.STOPPED],
    Role.FAILED: [RoleEvent.FAILED],
}

LEGAL = {
    (Role.INIT, RoleEvent.INITIALIZED): Role.STANDBY,
    (Role.INIT, RoleEvent.STOPPED): Role.STOPPED,
    (Role.INIT, RoleEvent.FAILED): Role.FAILED,
    (Role.STANDBY, RoleEvent.LOCK_GRANTED): Role.PROMOTING,
    (Role.STANDBY, RoleEvent.STOPPED): Role.STOPPED,
    (Role.STANDBY, RoleEvent.FAILED): Role.FAILED,
    (Role.PROMOTING, RoleEvent.PROMOTED): Role.ACTIVE,
    (Role.PROMOTING, RoleEvent.PROMOTION_ROLLED_BACK): Role.STANDBY,
    (Role.PROMOTING, RoleEvent.STOPPED): Role.STOPPED,
    (Role.PROMOTING, RoleEvent.FAILED): Role.FAILED,
    (Role.ACTIVE, RoleEvent.HANDOVER_STARTED): Role.HANDOVER,
    (Role.ACTIVE, RoleEvent.DRAIN_STARTED): Role.DRAINING,
    (Role.ACTIVE, RoleEvent.FAILED): Role.FAILED,
    (Role.HANDOVER, RoleEvent.HANDOVER_REVERTED): Role.ACTIVE,
    (Role.HANDOVER, RoleEvent.DRAIN_STARTED): Role.DRAINING,
    (Role.HANDOVER, RoleEvent.STOPPED): Role.STOPPED,
    (Role.HANDOVER, RoleEvent.FAILED): Role.FAILED,
    (Role.DRAINING, RoleEvent.STOPPED): Role.STOPPED,
    (Role.DRAINING, RoleEvent.FAILED): Role.FAILED,
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("event", RoleEvent)
def test_every_cell(role: Role, event: RoleEvent) -> None:
    machine = RoleMachine(now=0.0)
    for step in PATHS[role]:
        machine.handle(step, now=1.0)
    assert machine.role is role
    if (role, event) in LEGAL:
        assert machine.handle(event, now=2.0) is LEGAL[role, event]
        assert machine.since == 2.0
    else:
        with pytest.raises(IllegalTransition, match=role):
            machine.handle(event, now=2.0)
        assert machine.role is role


def test_the_table_holds_nothing_else() -> None:
    assert dict(TRANSITIONS) == LEGAL
