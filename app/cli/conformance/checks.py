"""What a check is, and the lives that they are put into. The checks themselves stand beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from app.cli.conformance.subject import State, Subject


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """``run`` returns what is worth knowing, or raises Failed or Skipped. ``seconds``: after so many it has failed."""

    name: str
    promise: str
    needs: State
    run: Callable[[Subject], Awaitable[str | None]]
    seconds: float = 120.0


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """Checks that one engine goes through in one process, in this order."""

    name: str
    checks: Sequence[Check]
