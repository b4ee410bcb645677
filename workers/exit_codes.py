"""[P] Exit codes of the worker's processes; each exit is logged with its reason."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a supervisor, or a person, can conclude from how a process ended."""

    DRAINED = 0
    ENGINE_DEAD = 1
    BAD_CONFIGURATION = 2
    """A restart would end the same way."""
    FORCED = 70
    """Shutdown overran, or a second signal came."""
    MEMORY_SERVICE_LOST = 75
