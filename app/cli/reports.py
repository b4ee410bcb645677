"""[P] What is heard from the processes of a run folder, or why nothing is."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from workers.state import EngineState


class Absence(StrEnum):
    """Why a process says nothing."""

    GONE = "gone"
    """Nobody listens on its port."""
    STARTING = "starting"
    """Nobody listens on its port yet; its process is there, or the one that forks it. ``hotspare status`` looks."""
    SILENT = "silent"
    """Somebody listens, and does not answer: stopped, or stuck."""
    UNAUTHORIZED = "unauthorized"
    """A gateway that asks for an API key, and was shown none."""
    WRONG_KEY = "wrong-key"
    """A gateway that does not know the API key that it was shown."""
    UNTRUSTED = "untrusted"
    """A gateway that does not have the certificate it should have."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway thinks of one worker."""

    address: str
    state: str
    routable: bool
    worker: str | None = None
    epoch: int | None = None
    problem: str | None = None
    """Why it is not used, if somebody can do something about it."""
    models: tuple[str, ...] = ()


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the gateway's ``/status`` that the command line uses; what else comes is ignored."""

    lifecycle: str
    inflight: int
    waiting: int
    workers: tuple[WorkerReport, ...]


EngineAnswer = EngineState | Absence
