"""[P] When a process that ended is started again, and when that is hopeless. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.exit_codes import BAD_CONFIGURATION, DRAINED, OVERRAN

QUICK_SECONDS: Final = 10.0
"""A process that ended sooner is not started again at once a second time."""
FIRST_DELAY_SECONDS: Final = 0.25
MAX_DELAY_SECONDS: Final = 10.0
STARTS_LIMIT: Final = 3
"""So many starts that came to nothing, for each process there should be, while none serves: the supervisor ends."""
BEAT: Final = b"."
"""What a process says that serves."""
DRAINED_WORD: Final = b"d"
"""What it says when nothing is in flight in it any more."""
END_WORD: Final = b"e"
"""What it hears when that is so in all of them."""
BEAT_SECONDS: Final = 1.0
"""How often a process that serves says so."""
START_SECONDS: Final = 120.0
"""One that has said nothing yet may be silent for so long: longer than the chart's startup probe waits, and as long as
imports take on a machine that is very busy. To begin again would only make it busier."""
START_DRAIN_SECONDS: Final = 2.0
"""In a drain: it has nothing to lose, and leaves by itself in less."""
OVERRUN_SECONDS: Final = 15.0
"""A process that is still there so long after its drain's time is killed: it ends by itself within a few seconds."""
SILENCE_SECONDS: Final = 10.0
"""One that says nothing for so long hangs, and is killed."""
LATE_SECONDS: Final = 2.0
"""Who wakes up so much later than it wanted was held up itself, and knows nothing of others."""


@dataclass(slots=True)
class Hearing:
    """Of one process: when it was last heard, or started."""

    heard_at: float
    serves: bool = False
    """It has spoken."""

    @property
    def due_at(self) -> float:
        return self.heard_at + (SILENCE_SECONDS if self.serves else START_SECONDS)

    def heard(self, now: float) -> None:
        self.heard_at, self.serves = now, True

    def hangs(self, now: float, *, woken_late: float) -> bool:
        """Ask after having listened. ``woken_late``: by how much whoever listens was late."""
        if woken_late >= LATE_SECONDS:
            self.heard_at = now
        return now >= self.due_at


@dataclass(slots=True)
class Restarts:
    """Of one process's place."""

    quick: int = 0
    """Ends in a row that came soon."""

    def delay(self, lived: float) -> float:
        """How long to wait before the next start, after a life of so many seconds."""
        if lived >= QUICK_SECONDS:
            self.quick = 0
            return 0.0
        self.quick += 1
        if self.quick == 1:
            return 0.0
        return min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self.quick - 2, 16))


def hopeless(code: int, *, failed_starts: int, places: int, serving: int) -> bool:
    """Whether to give up after a start that came to nothing with this exit code."""
    if serving:
        return False
    return code == BAD_CONFIGURATION or failed_starts >= STARTS_LIMIT * places


def exit_code(codes: list[int]) -> int:
    """The worst of the children's. A death by signal, as ``subprocess`` writes it (negative), is a failure."""
    if OVERRAN in codes:
        return OVERRAN
    failures = [code if code > 0 else 1 for code in codes if code != DRAINED]
    return failures[0] if failures else DRAINED
