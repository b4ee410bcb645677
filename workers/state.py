"""[P] The document at ``/state`` of an engine's admin port: for supervisors, the command line, and people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gms.custody_phases import CustodyState, Phase
from workers.contract import Role
from workers.engine import EngineMemory
from workers.self_test import SelfTest


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """When the parts of this engine's last promotion were done: ``time.monotonic()`` seconds, which on Linux is one
    clock for all processes of a machine."""

    epoch: int
    granted: float
    """The kernel gave the lock."""
    epoch_written: float
    memory_mapped: float
    bound: float
    """The serving port listens."""


class ServiceLink(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stands with the memory service. Not ``connected``, it serves on with the pages that it has."""

    connected: bool
    adrift_seconds: float | None
    """How long the service has been gone, while it is awaited; None if it is not."""
    restored: int
    """How often a service that started again has taken this engine's pages back."""
    private: tuple[str, ...]
    """Pools that it holds as private copies, which no other engine can use."""
    problem: str
    """Why no service took something back; a sentence, or empty."""

    @property
    def summary(self) -> str:
        """For people: a few words."""
        if self.private:
            return f"private copy of {', '.join(self.private)}: {self.problem}"
        if self.problem:
            return self.problem
        return "connected" if self.adrift_seconds is None else f"gone for {self.adrift_seconds:.1f} s"


def service_link(states: Sequence[CustodyState]) -> ServiceLink | None:
    """From how each custody stands; None if there is none, or there is no service."""
    if not states:
        return None
    adrift = [state.seconds for state in states if state.phase is Phase.ADRIFT]
    refused = [state for state in states if state.phase in (Phase.PRIVATE, Phase.LOST)]
    return ServiceLink(
        connected=all(state.phase is Phase.HELD for state in states),
        adrift_seconds=round(max(adrift), 3) if adrift else None,
        restored=max(state.restored for state in states),
        private=tuple(state.pool for state in states if state.phase is Phase.PRIVATE),
        problem="; ".join(dict.fromkeys(state.reason for state in refused)),
    )


class DrainState(msgspec.Struct, frozen=True, kw_only=True):
    """How far an engine is that is told to go. ``phase`` is one of ``workers.drain_plan.Phase``, or a stage of
    ``workers.handover.Stage``; ``remaining``: requests by route group; times are seconds."""

    phase: str
    seconds: float
    """Since it was told to."""
    left_seconds: float | None
    """Until what remains is cut, or the hand-over called off; None: no such time is set yet."""
    remaining: dict[str, int]
    bound: tuple[str, ...] = ()
    """Before a hand-over: the requests that are waited for since no other engine could go on with them, the oldest
    ones. Ids and paths, nothing of their content."""
    cut: bool | None = None
    """Then: whether they are cut when the time is over."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The document at ``/state``."""

    worker: str
    instance: str
    engine: str
    role: Role
    role_seconds: float
    pid: int
    keeper_pid: int | None
    restarts: int
    """How many engines of this name there were before this one in the pod's life, whichever keeper forked them."""
    epoch: int
    inflight: int
    capacity: int
    steps: int
    models: tuple[str, ...]
    standby: Role | None
    memory: EngineMemory | None
    rss_bytes: int
    monotonic: float
    memory_service: ServiceLink | None = None
    promotion: Promotion | None = None
    draining: DrainState | None = None
    failure: str | None = None
    obstacle: str | None = None
    """Why its last promotion failed; None if none did since one succeeded."""
    self_test: SelfTest | None = None
    """What the engine's self-tests say, as long as it is parked; None in any other role."""

    @property
    def spare(self) -> bool:
        """Whether this engine could take over now, as far as is known."""
        return self.role is Role.STANDBY and (self.self_test is None or self.self_test.ok)

    @property
    def since(self) -> float:
        """When it took its role; seconds of the machine's monotonic clock."""
        return self.monotonic - self.role_seconds
