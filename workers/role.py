"""An engine's life as one table: states, events, what follows.

    INIT ──► STANDBY ──► PROMOTING ──► ACTIVE ──► DRAINING ──► STOPPED
                ▲            │            │  ▲
                └────────────┘            ▼  │
                  rolled back          HANDOVER ──► DRAINING

Any state may end in FAILED (something broke) and any live one in STOPPED (asked to leave with nothing to drain).
The machine knows nothing of locks, memory or sockets; ``workers.life`` acts, and tells it what happened.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final

from workers.contract import Role

__all__ = ["READY_ROLES", "TRANSITIONS", "IllegalTransition", "Role", "RoleEvent", "RoleMachine"]


class RoleEvent(StrEnum):
    """What can happen to an engine."""

    INITIALIZED = "initialized"
    """Weights attached, warmed up, parked: ready to wait for the lock."""
    LOCK_GRANTED = "lock_granted"
    PROMOTED = "promoted"
    """KV mapped, epoch written, serving port bound."""
    PROMOTION_ROLLED_BACK = "promotion_rolled_back"
    HANDOVER_STARTED = "handover_started"
    HANDOVER_REVERTED = "handover_reverted"
    DRAIN_STARTED = "drain_started"
    STOPPED = "stopped"
    FAILED = "failed"


READY_ROLES: Final = frozenset({Role.STANDBY, Role.PROMOTING, Role.ACTIVE, Role.HANDOVER, Role.DRAINING})
"""An engine in one of these has been initialised. FAILED and STOPPED say nothing of it: INIT may end in both."""

_R, _E = Role, RoleEvent

TRANSITIONS: Final = MappingProxyType(
    {
        (_R.INIT, _E.INITIALIZED): _R.STANDBY,
        (_R.INIT, _E.STOPPED): _R.STOPPED,
        (_R.INIT, _E.FAILED): _R.FAILED,
        (_R.STANDBY, _E.LOCK_GRANTED): _R.PROMOTING,
        (_R.STANDBY, _E.STOPPED): _R.STOPPED,
        (_R.STANDBY, _E.FAILED): _R.FAILED,
        (_R.PROMOTING, _E.PROMOTED): _R.ACTIVE,
        (_R.PROMOTING, _E.PROMOTION_ROLLED_BACK): _R.STANDBY,
        (_R.PROMOTING, _E.STOPPED): _R.STOPPED,
        (_R.PROMOTING, _E.FAILED): _R.FAILED,
        (_R.ACTIVE, _E.HANDOVER_STARTED): _R.HANDOVER,
        (_R.ACTIVE, _E.DRAIN_STARTED): _R.DRAINING,
        (_R.ACTIVE, _E.FAILED): _R.FAILED,
        (_R.HANDOVER, _E.HANDOVER_REVERTED): _R.ACTIVE,
        (_R.HANDOVER, _E.DRAIN_STARTED): _R.DRAINING,
        (_R.HANDOVER, _E.STOPPED): _R.STOPPED,
        (_R.HANDOVER, _E.FAILED): _R.FAILED,
        (_R.DRAINING, _E.STOPPED): _R.STOPPED,
        (_R.DRAINING, _E.FAILED): _R.FAILED,
    }
)
"""(state, event) → next state. A pair that is not here is illegal."""


class IllegalTransition(Exception):
    """An event came that its state does not know: a bug in the code that acts."""

    def __init__(self, role: Role, event: RoleEvent) -> None:
        super().__init__(f"an engine that is {role} cannot take the event {event!r}")
        self.role = role
        self.event = event


class RoleMachine:
    """Holds one engine's role, and since when (seconds of whatever clock the caller passes in)."""

    def __init__(self, *, now: float) -> None:
        self.role: Role = Role.INIT
        self.since: float = now

    def handle(self, event: RoleEvent, *, now: float) -> Role:
        """Move on, and return the new role.

        Raises:
            IllegalTransition: the table has no such cell; the role is unchanged.
        """
        try:
            role = TRANSITIONS[self.role, event]
        except KeyError:
            raise IllegalTransition(self.role, event) from None
        self.role, self.since = role, now
        return role
