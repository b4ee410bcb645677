"""How one custody of the service's pages stands, and what can become of it. Pure; `gms.custody` acts on it.

HELD ──connection ends──► ADRIFT ──handed back──► HELD
  │                          ├──a newer epoch has the pool, or their content is wrong──► LOST: stop serving
  └──nobody watches────────► ├──refused, or nobody came──► PRIVATE: serve on, nobody else can use these pages
                             └── its owner is done, from any phase ──► ENDED
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from gms.protocol import ErrorCode, GmsError


class Phase(StrEnum):
    HELD = "HELD"
    ADRIFT = "ADRIFT"
    PRIVATE = "PRIVATE"
    LOST = "LOST"
    ENDED = "ENDED"


_NEXT: Final = {
    Phase.HELD: {Phase.ADRIFT, Phase.PRIVATE, Phase.ENDED},
    Phase.ADRIFT: {Phase.HELD, Phase.PRIVATE, Phase.LOST, Phase.ENDED},
    Phase.PRIVATE: {Phase.ENDED},
    Phase.LOST: {Phase.ENDED},
    Phase.ENDED: frozenset[Phase](),
}
_NOT_TO_BE_USED: Final = frozenset({ErrorCode.FENCED, ErrorCode.STALE_EPOCH, ErrorCode.CORRUPT})
"""The pages are another's to write, or are not what was committed: answers from them would be wrong."""
_FOR_GOOD: Final = frozenset(
    {
        ErrorCode.ALREADY_ATTACHED,
        ErrorCode.CLOSED,
        ErrorCode.EXISTS,
        ErrorCode.INVALID,
        ErrorCode.MISMATCH,
        ErrorCode.NOT_FOUND,
        ErrorCode.NOT_PERMITTED,
        ErrorCode.SIZE_MISMATCH,
        ErrorCode.VERSION_MISMATCH,
        ErrorCode.WRONG_DEVICE,
    }
)
"""Said of these pages or of this client, and so said again. Every other failure is one of the moment: a mistake of the
service, descriptors or memory that were short, an answer that was late or was cut off."""


class CustodyState(Struct, frozen=True, kw_only=True):
    """`seconds` since the phase began, `restored` how often the pages were handed back, `reason` a sentence where a
    service refused them or never came."""

    pool: str
    phase: Phase
    seconds: float
    restored: int
    reason: str = ""


def step(phase: Phase, to: Phase) -> Phase:
    """Raises ValueError for a step that there is none."""
    if to not in _NEXT[phase]:
        raise ValueError(f"a custody that is {phase} cannot become {to}")
    return to


def after_failure(error: Exception, *, overdue: bool) -> Phase:
    """What a failed try to hand pages back makes of a custody that is ADRIFT: the same if it is to be tried again,
    which `overdue` ends."""
    if isinstance(error, GmsError):
        if error.code in _NOT_TO_BE_USED:
            return Phase.LOST
        if error.code in _FOR_GOOD:
            return Phase.PRIVATE
    return Phase.PRIVATE if overdue else Phase.ADRIFT
