"""[P] The document at ``/state`` of an engine's admin port: for supervisors, the command line, and people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gms.custody_phases import CustodyState, Phase
from workers.contract import Role
from workers.engine import EngineMemory


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
    """How many engines this keeper has forked before this one."""
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
    failure: str | None = None

    @property
    def since(self) -> float:
        """When it took its role; seconds of the machine's monotonic clock."""
        return self.monotonic - self.role_seconds
