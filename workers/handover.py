"""[P] The hand-over of a pod from its active engine to a spare: what each side says, decides, and gives up after.

The active engine's way, one event a cell:

    SETTLING ──settled──► ASKING ──accepted──► QUIESCING ──quiesced──► WAITING ──acknowledged──► HANDED_OVER
      ▲   │ failed          │                   │    │                    │ failed           ▲
      │   │                 │ failed     failed │    │ unsettled          ▼    acknowledged  │
      │   │                 ▼                   │    │                 RETAKING ─────────────┘
      │   └──────────────► KEPT ◄───────────────┘    │                    │ granted        │ failed
      └──────────────────────────────────────────────┘                    ▼                ▼
                                                           TAKEN_BACK ◄─ RESTORING ──────► LOST
                                                                 restored     failed

In SETTLING the engine serves as ever, and waits for requests that nobody could go on with elsewhere; one that comes
before the others are held in QUIESCING is waited for, too. Unless somebody wants them cut, it fails if they do not end
in time. In WAITING the lock is free and nothing is mapped: whoever
gets the lock serves. All spares are asked, since the kernel decides who is next, and any of them may say that it
serves; if none does, or those that promised die, or take too long, the lock is taken back. In RETAKING both may still
come about: the answer was only late, or the lock comes. So the two ends that matter, HANDED_OVER and TAKEN_BACK, are
told apart by the lock alone.
``workers.handing_over`` acts.
"""

from __future__ import annotations

import math
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final

import msgspec

from workers.contract import Role

OFFER_PATH: Final = "/handover/offer"
OUTCOME_PATH: Final = "/handover/outcome"
CANCEL_PATH: Final = "/handover/cancel"
START_PATH: Final = "/handover"

ANSWER_SECONDS: Final = 1.0
"""A spare says at once whether it would; one that does not is not asked to if another one would. If none would, it has
a step's time: the engine that asks serves on meanwhile."""
PATIENCE_SECONDS: Final = 10.0
"""But no more: nobody hears meanwhile that the hand-over is called off."""
SLACK_SECONDS: Final = 1.0
"""What a message may take, on top of what somebody was given to do."""


MIN_STEP_SECONDS: Final = 0.1
WAIT_SECONDS: Final = 30.0
"""For requests that no other engine could go on with, unless a person says how long."""
MAX_WAIT_SECONDS: Final = 86400.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a person says who wants the engines of a pod to change places."""

    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_SECONDS)] = WAIT_SECONDS
    """For requests that no other engine could go on with."""
    cut: bool = False
    """Whether those that are left then are cut. Otherwise the hand-over is called off."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How long a hand-over may take; times of one monotonic clock."""

    settle_until: float
    """Until then requests are waited for that no other engine could go on with."""
    step_seconds: float
    """For each of its steps: ``handover_timeout_seconds``, unless there is less."""
    cut: bool = True
    """What becomes of requests that are left at ``settle_until``: they are cut, or nothing is handed over."""
    end: float = math.inf
    """Until then requests have to be over that are waited for, should it come to nothing."""
    off: str = ""
    """Why the hand-over is called off as long as requests are waited for; a sentence, or empty."""

    def step(self, *, now: float) -> float:
        """For one that begins now. Quiescing, waiting and taking back have one each, and as much is left then, of which
        asking takes little, or one at most."""
        return min(self.step_seconds, max(MIN_STEP_SECONDS, (self.end - now) / 5))


GONE: Final = "whoever asked for it has gone"
TOLD_TO_STOP: Final = "it was told to stop meanwhile, and waits for its requests"


def budget(
    *,
    began: float,
    asked: Asked | None,
    told_at: float | None,
    shutdown_seconds: float,
    step_seconds: float,
    gone: bool = False,
    waits: bool = False,
) -> Budget:
    """Of a hand-over that ``began`` then, as things stand now: they may change as long as requests are waited for.

    ``told_at``: when this engine was told to stop; None: it was not, and only is to change places as ``asked``. One
    that is told while it does so goes on as if it had been told at first: it has no more time than that. ``gone``:
    nobody waits for what was asked for. ``waits``: an engine that is told to stop hands nothing over.
    """
    if told_at is None:
        asked = asked or Asked()
        off = GONE if gone else ""
        return Budget(settle_until=began + asked.wait_seconds, step_seconds=step_seconds, cut=asked.cut, off=off)
    end = told_at + shutdown_seconds
    return Budget(
        settle_until=end - min(5 * step_seconds, shutdown_seconds / 4),
        step_seconds=step_seconds,
        end=end,
        off=TOLD_TO_STOP if waits else "",
    )


class Stage(StrEnum):
    SETTLING = "settling"
    ASKING = "asking"
    QUIESCING = "quiescing"
    WAITING = "waiting"
    RETAKING = "retaking"
    RESTORING = "restoring"
    KEPT = "kept"
    """Nothing was given away: it serves as before."""
    HANDED_OVER = "handed_over"
    TAKEN_BACK = "taken_back"
    """It serves again, under an epoch of its own; its streams have noticed a pause."""
    LOST = "lost"
    """Neither: somebody else has the lock and does not say that it serves, or this engine could not map its pages."""


class Happening(StrEnum):
    SETTLED = "settled"
    UNSETTLED = "unsettled"
    ACCEPTED = "accepted"
    QUIESCED = "quiesced"
    ACKNOWLEDGED = "acknowledged"
    GRANTED = "granted"
    RESTORED = "restored"
    FAILED = "failed"
    """Refused, broken, too late: whatever was tried in this stage came to nothing."""


_S, _H = Stage, Happening

STAGES: Final = MappingProxyType(
    {
        (_S.SETTLING, _H.SETTLED): _S.ASKING,
        (_S.SETTLING, _H.FAILED): _S.KEPT,
        (_S.ASKING, _H.ACCEPTED): _S.QUIESCING,
        (_S.ASKING, _H.FAILED): _S.KEPT,
        (_S.QUIESCING, _H.UNSETTLED): _S.SETTLING,
        (_S.QUIESCING, _H.QUIESCED): _S.WAITING,
        (_S.QUIESCING, _H.FAILED): _S.KEPT,
        (_S.WAITING, _H.ACKNOWLEDGED): _S.HANDED_OVER,
        (_S.WAITING, _H.FAILED): _S.RETAKING,
        (_S.RETAKING, _H.ACKNOWLEDGED): _S.HANDED_OVER,
        (_S.RETAKING, _H.GRANTED): _S.RESTORING,
        (_S.RETAKING, _H.FAILED): _S.LOST,
        (_S.RESTORING, _H.RESTORED): _S.TAKEN_BACK,
        (_S.RESTORING, _H.FAILED): _S.LOST,
    }
)
"""(stage, what happened) → next stage. A pair that is not here is illegal."""

ENDS: Final = frozenset({Stage.KEPT, Stage.HANDED_OVER, Stage.TAKEN_BACK, Stage.LOST})


class IllegalHappening(Exception):
    """Something happened that its stage does not know: a bug in the code that acts."""


class Handover:
    """One hand-over, as the active engine goes through it."""

    def __init__(self) -> None:
        self.stage = Stage.SETTLING
        self.reason = ""
        """Why it came to nothing, or took a longer way; a sentence."""

    @property
    def over(self) -> bool:
        return self.stage in ENDS

    def happened(self, happening: Happening, reason: str = "") -> Stage:
        """Move on, and return the new stage.

        Raises:
            IllegalHappening: the table has no such cell; the stage is unchanged.
        """
        try:
            self.stage = STAGES[self.stage, happening]
        except KeyError:
            raise IllegalHappening(f"a hand-over that is {self.stage} cannot take {happening!r}") from None
        self.reason = self.reason or reason
        return self.stage


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What the active engine asks a spare: would you take over?"""

    instance: str
    engine: str
    epoch: int
    quiesce_seconds: float
    """How long the lock may take to come, and then this engine to serve."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Tell me once you serve with a higher epoch than this, or cannot."""

    epoch: int
    seconds: float


class SpareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a spare knows of itself when it is asked."""

    instance: str
    role: Role
    leaving: bool
    """It was told to stop itself."""
    in_line: bool
    """It waits for the lock. False: its last promotion failed, and it does not stand in line again yet."""
    obstacle: str = ""
    """Why its last promotion failed, if none succeeded since."""
    unfit: str = ""
    """Why it would not do, from its self-test: a sentence, or empty."""


LEAVING: Final = "it was told to stop itself"
"""A refusal that needs nobody's attention: the pod stops."""


def refusal(offer: Offer, facts: SpareFacts) -> str:
    """Why a spare does not take over; empty: it does."""
    if offer.instance != facts.instance:
        return f"it belongs to another life of the pod ({facts.instance})"
    if facts.leaving:
        return LEAVING
    if facts.role is not Role.STANDBY:
        return f"it is {facts.role} and not {Role.STANDBY}"
    if not facts.in_line:
        return f"it does not stand in line for the lock yet ({facts.obstacle or 'it has only just become a spare'})"
    return facts.unfit


class Expectation:
    """A spare's, from its yes to the hand-over's end. Times are seconds of one monotonic clock.

    The other engine says so when it waits no more: then a promotion that is under way for it is taken back. One that
    says nothing has died, or has what it waits for; and a promotion that begins later is a fail-over like any other.
    """

    def __init__(self) -> None:
        self.patience_seconds = 0.0
        """How long a wake that is under way may go on once the other engine waits no more: that one waits for the lock
        then, and longer than this."""
        self._until: float | None = None
        self._expected = False
        self._cancelled = False

    def accept(self, offer: Offer, *, now: float) -> None:
        self.patience_seconds = offer.quiesce_seconds + SLACK_SECONDS
        self._until = now + offer.quiesce_seconds + SLACK_SECONDS
        self._cancelled = False

    def cancel(self) -> None:
        """The other engine waits no more."""
        self._until, self._cancelled = None, True

    def granted(self, *, now: float) -> None:
        """The lock came: somebody waits for this promotion, or it follows a death."""
        self._expected = self._until is not None and now <= self._until
        self._until, self._cancelled = None, False

    @property
    def late(self) -> bool:
        """Whether the promotion under way was to be done for somebody who goes on himself by now."""
        return self._expected and self._cancelled

    def over(self) -> None:
        """The promotion has ended, in whatever way."""
        self._until, self._expected, self._cancelled = None, False, False
