"""[P] What is kept of a request so that it can be started again, and go on where it was.

Its body until anything of the answer was delivered, since until then it can run again from the start. From then on,
body and token notes together, as long as the answer can be resumed from them; what cannot be is let go at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.openai.units import MOST_TOKENS, NoteLog, first_look


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLimits:
    """``body_bytes``: largest body of a request that can be resumed; ``tokens``: most tokens of its answer so far."""

    body_bytes: int = 1 << 62
    tokens: int = MOST_TOKENS
    look_at: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "look_at", first_look(self.tokens))


class Kept(NoteLog):
    """One request's. All attempts at it write their notes here."""

    __slots__ = ("_begun", "_limits", "body", "wanted")

    def __init__(self, body: bytes, limits: KeepLimits, *, wanted: bool) -> None:
        """``wanted``: whether workers are asked for notes of this request."""
        # Once for each request, so what NoteLog does is written out.
        self.events = 0
        self.crc = b"0"
        self.rest = bytearray()
        self.unresumable = ""
        self._max_tokens = limits.tokens
        self._look_at = limits.look_at
        self.body = body
        """Empty once it is of no use any more. Later attempts send it."""
        self.wanted = wanted
        self._limits = limits
        self._begun = False

    @property
    def resumable(self) -> bool:
        """Whether another engine could go on with the answer, if it has begun."""
        return self.wanted and not self.unresumable

    def begun(self) -> None:
        """The first events of the answer are about to be delivered, so that it cannot start again."""
        self._begun = True
        if not self.wanted or self.unresumable:
            self.body = b""
        elif not self.events:
            self.give_up("no_notes")
        elif len(self.body) > self._limits.body_bytes:
            self.give_up("body")

    def done(self) -> None:
        """The answer is delivered whole, or in a form that nobody could go on with."""
        self._begun = True
        self.wanted = False
        self.body = b""

    def give_up(self, reason: str) -> None:
        """``reason``: also ``body`` (too large) or ``no_notes`` (the worker wrote none)."""
        super().give_up(reason)
        if self._begun:
            self.body = b""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.rest)
