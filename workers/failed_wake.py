"""[P] A promotion that failed: what was in its way, and whether the engine tries again.

Whatever it was, everything has been taken back by then, the lock last: another engine may have its turn. This one
tries again too, since what ails a pod (a port, a full disk, a memory service that starts) is often gone a moment later,
but it waits longer each time, so that others come first and the log can be read. After ``TRIES`` in a row its process
gives itself up: what ails it may be gone with it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from gms.protocol import ErrorCode, GmsError

TRIES: Final = 5
MAX_DELAY_SECONDS: Final = 10.0
_OF_SETTINGS: Final = frozenset(
    {ErrorCode.OUT_OF_MEMORY, ErrorCode.SIZE_MISMATCH, ErrorCode.VERSION_MISMATCH, ErrorCode.WRONG_DEVICE}
)
_NO_ANSWER: Final = frozenset({ErrorCode.SERVICE_GONE, ErrorCode.CLOSED, ErrorCode.TIMEOUT, ErrorCode.INTERNAL})


class Cause(StrEnum):
    """What was in the way; a label of metrics."""

    EPOCH = "epoch"
    """It could not be written to the lock file."""
    MEMORY = "memory"
    """The memory service has no pages for it, or not yet."""
    SERVICE = "service"
    """The memory service does not answer."""
    ENGINE = "engine"
    """The engine itself did not wake."""
    PORT = "port"
    """Somebody else has the serving port, or it cannot be had at all."""
    ENDPOINT = "endpoint"
    """The port is bound, and what should answer there does not."""
    LATE = "late"
    """In a hand-over, the engine that leaves had stopped waiting, and goes on itself."""


HINTS: Final = {
    Cause.EPOCH: "see that the disk of the run folder has room and can be written",
    Cause.MEMORY: "hotspare status says who holds the memory",
    Cause.SERVICE: "see whether the memory service runs",
    Cause.ENGINE: "the traceback is above",
    Cause.PORT: "free it, or choose another with --serving-port or HOTSPARE_SERVING_PORT",
    Cause.ENDPOINT: "see whether something (a firewall, a host name) is between this process and its own port",
    Cause.LATE: "the other engine serves on; see what took so long, or lengthen HOTSPARE_HANDOVER_TIMEOUT_SECONDS",
}
"""What a person can do about each."""


class WakeFailed(Exception):
    """A promotion cannot be completed; the message is a sentence."""

    def __init__(self, cause: Cause, sentence: str) -> None:
        super().__init__(sentence)
        self.cause = cause


class Next(msgspec.Struct, frozen=True):
    """What follows: another try after ``delay_seconds``, or the end of this process."""

    give_up: bool
    delay_seconds: float


class FailedWakes:
    """Counts the failures of one engine, in a row. ``first_delay_seconds`` is the wait after the first."""

    def __init__(self, *, first_delay_seconds: float) -> None:
        self._first = first_delay_seconds
        self.in_a_row = 0
        self.obstacle: str | None = None
        """Why the last promotion failed; None once one succeeded."""

    def failed(self, error: WakeFailed) -> Next:
        self.in_a_row += 1
        self.obstacle = f"{error.cause}: {error}"
        if self.in_a_row >= TRIES:
            return Next(True, 0.0)
        return Next(False, min(self._first * 2 ** (self.in_a_row - 1), MAX_DELAY_SECONDS))

    def succeeded(self) -> None:
        self.in_a_row, self.obstacle = 0, None


def is_hopeless(error: GmsError) -> bool:
    """Whether the memory service would say no again until settings change: memory that does not fit even beside what
    living engines hold, say. What only is short for now, it calls retryable."""
    return error.code in _OF_SETTINGS and not error.retryable


def cause_of(error: GmsError) -> Cause:
    """Whether the memory service said no, or nothing."""
    return Cause.SERVICE if error.code in _NO_ANSWER else Cause.MEMORY
