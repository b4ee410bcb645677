"""The spare's side of a hand-over: what its admin port answers to the engine that wants to leave
(``workers.handover``).

It promises, says how its promotion went, and is told when nobody waits for it any more. The promotion itself is the
same as after a death: this engine waits on the lock in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from workers.admin import Answer
from workers.contract import Role
from workers.handover import SLACK_SECONDS, Expectation, Offer, SpareFacts, Wait, refusal
from workers.settings import EngineSettings
from workers.vitals import Vitals

CONFLICT = 409
TIMEOUT = 408


class TakingOver:
    """One engine's, for its whole life."""

    def __init__(
        self,
        settings: EngineSettings,
        vitals: Vitals,
        expectation: Expectation,
        *,
        leaving: Callable[[], bool],
        in_line: Callable[[], bool],
        hurry: Callable[[], None],
    ) -> None:
        """``hurry`` a promotion that is under way: nobody waits for it any more."""
        self._settings = settings
        self._vitals = vitals
        self._expectation = expectation
        self._leaving = leaving
        self._in_line = in_line
        self._hurry = hurry
        self._rollbacks = 0
        """How many promotions had been taken back when it promised."""

    async def offer(self, body: bytes) -> Answer:
        """Whether this engine would take over now."""
        offer = msgspec.json.decode(body, type=Offer)
        now = time.monotonic()
        facts = SpareFacts(
            instance=self._settings.instance,
            role=self._vitals.role,
            leaving=self._leaving(),
            in_line=self._in_line(),
            obstacle=self._vitals.obstacle or "",
            unfit=self._vitals.self_tests.report(now=now).problem or "",
        )
        reason = refusal(offer, facts)
        if reason:
            return CONFLICT, self._document(reason=reason)
        self._expectation.accept(offer, now=now)
        self._rollbacks = self._vitals.rollbacks
        return 200, self._document()

    async def outcome(self, body: bytes) -> Answer:
        """Once it is known whether this engine serves."""
        wait = msgspec.json.decode(body, type=Wait)
        deadline = time.monotonic() + wait.seconds
        while True:
            if self._vitals.role is Role.ACTIVE and self._vitals.epoch > wait.epoch:
                return 200, self._document()
            if self._leaving() or self._vitals.role in (Role.FAILED, Role.STOPPED):
                return CONFLICT, self._document(reason=f"it is {self._vitals.role} and was told to stop, or failed")
            if self._vitals.rollbacks != self._rollbacks:
                return CONFLICT, self._document(reason="its promotion was taken back")
            left = deadline - time.monotonic()
            if left <= 0:
                return TIMEOUT, self._document(reason="it does not serve yet")
            await self._vitals.role_change.wait(timeout_seconds=left)

    async def cancel(self, body: bytes) -> Answer:
        """Nobody waits any more; says what it is once a promotion that is under way has ended, in whatever way."""
        self._expectation.cancel()
        self._hurry()
        deadline = time.monotonic() + SLACK_SECONDS
        while self._vitals.role is Role.PROMOTING and (left := deadline - time.monotonic()) > 0:
            await self._vitals.role_change.wait(timeout_seconds=left)
        return 200, self._document()

    def _document(self, *, reason: str = "") -> dict[str, Any]:
        vitals = self._vitals
        return {
            "engine": self._settings.engine_id,
            "role": vitals.role,
            "epoch": vitals.epoch,
            "pid": vitals.pid,
            "reason": reason,
        }
