"""[P] The document at ``/state`` of an engine's admin port: for supervisors, the command line, and people."""

from __future__ import annotations

import msgspec

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
    promotion: Promotion | None = None
    failure: str | None = None

    @property
    def since(self) -> float:
        """When it took its role; seconds of the machine's monotonic clock."""
        return self.monotonic - self.role_seconds
