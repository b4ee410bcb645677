"""What becomes of a request whose worker broke under it: resumed, run again from the start, or given up.

Made at a request's first break. Another worker goes on with what was delivered if the notes of it are there and allow
it; if nothing was delivered, the request runs again. Otherwise the client is told: nothing is ever guessed. A request
may break as often as it likes as long as it gains something each time; so many times in a row as ``resume_limit`` says
without having gained anything, and it is given up. Breaks whose engine died do not count there: whether it is the
request that kills its workers is ``poison``'s to judge. What became of the engines is waited for where it matters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from app.fleet.deaths import Fate
from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.openai.errors import (
    GatewayError,
    Header,
    not_taken_up,
    request_kills_worker,
    unusable_answer,
    worker_lost,
)
from app.relay.attempt import Answer, Attempt, Verdict
from app.relay.deadlines import RelayLimits
from app.relay.delivery import Delivery
from app.relay.headers import upstream_headers
from app.relay.kept import Kept
from app.relay.poison import Event, RefusedBodies, Standing, Suspects, after
from app.relay.relayed import RelayRequest, Report, Try
from app.relay.search import Search
from workers.contract import Role
from workers.resume import RESUME_CONTENT_TYPE, ResumeHead, encode_resume

logger = logging.getLogger(__name__)

FATE_SECONDS: Final = 1.5
"""So long after a break an engine is given to die or to show that it lives: a heartbeat, and what a line must be later
than the break. What is not known then counts as a broken connection."""

MOST_TRIES_NAMED: Final = 16
"""In an access line; the first ones of a request that has more."""

_RESUME: Final = RESUME_CONTENT_TYPE.encode()


class RelayEvents(Protocol):
    """Who counts what happens to interrupted requests."""

    def resumed(self, *, route: str, reason: str, outcome: str) -> None:
        """``reason``: connection, silence or unusable. ``outcome``: resumed, refused, broken, or ended (the client
        left, the drain's time was over, or no worker came)."""
        ...

    def replayed(self, tokens: int) -> None: ...

    def stalled(self, seconds: float) -> None:
        """A client that had got something got nothing for so long."""
        ...

    def resume_refused(self, cause: str) -> None: ...

    def unresumable(self, reason: str) -> None:
        """From here on an answer could not be resumed any more."""
        ...

    def lost(self, *, route: str, reason: str) -> None: ...


class Uncounted:
    """``RelayEvents`` for a relay whose events nobody wants to know."""

    def resumed(self, *, route: str, reason: str, outcome: str) -> None:
        return

    def replayed(self, tokens: int) -> None:
        return

    def stalled(self, seconds: float) -> None:
        return

    def resume_refused(self, cause: str) -> None:
        return

    def unresumable(self, reason: str) -> None:
        return

    def lost(self, *, route: str, reason: str) -> None:
        return


class Ward:
    """What the recoveries of one relay share."""

    __slots__ = ("events", "limits", "refused", "registry", "suspects")

    def __init__(
        self, *, registry: WorkerRegistry, limits: RelayLimits, refused: RefusedBodies, events: RelayEvents
    ) -> None:
        self.registry = registry
        self.limits = limits
        self.refused = refused
        self.suspects = Suspects()
        self.events = events


@dataclass(frozen=True, slots=True)
class Doubt:
    """A break under a request that had gained nothing; what became of the engine is not known yet."""

    replica: Replica
    at: float
    alone: bool
    """It was the only suspect there."""


class Recovery:
    """One request's, from its first break to its end."""

    __slots__ = (
        "_barren",
        "_delivery",
        "_doubts",
        "_junk",
        "_kept",
        "_most",
        "_notes",
        "_over",
        "_reason",
        "_report",
        "_request",
        "_search",
        "_stalled_since",
        "_standing",
        "_tokens",
        "_vain",
        "_ward",
        "resuming",
    )

    def __init__(
        self,
        ward: Ward,
        request: RelayRequest,
        kept: Kept,
        delivery: Delivery,
        report: Report,
        search: Search,
    ) -> None:
        self._ward = ward
        self._request = request
        self._kept = kept
        self._delivery = delivery
        self._report = report
        self._search = search
        self.resuming = False
        """What is sent next is a resume."""
        self._most = 0
        """The furthest that it ever came: what is more has been gained."""
        self._junk = 0
        """Attempts that brought something and then what is no answer. Never forgotten: each one's notes are a gain."""
        self._notes = 0
        """How many there should be of a whole answer, counted apart from the log of them."""
        self._barren = 0
        """Breaks in a row without a gain that no engine's death explains, as far as is known."""
        self._standing = Standing.CLEAR
        self._doubts: list[Doubt] = []
        self._over = False
        self._vain = (Verdict.BROKEN, "")
        """How the last break without a gain was."""
        self._reason = ""
        """Why it is being resumed, until that is decided."""
        self._stalled_since = 0.0
        self._tokens = 0

    # What became of an attempt

    def broke(self, attempt: Attempt, verdict: Verdict, began_at: float) -> GatewayError | None:
        """The worker broke, or would not go on. Returns how the request ends, if it does."""
        now = time.monotonic()
        key = attempt.replica.key
        if len(self._report.tries) < MOST_TRIES_NAMED:
            self._report.tries += (Try(key.worker, key.epoch, began_at, now, attempt.reason or verdict.value),)
        if verdict is Verdict.UNRESUMED:
            return self._refused(attempt)
        self._notes = (self._notes if attempt.resumes else 0) + attempt.notes
        self._resume_ended("broken")
        alone = self._search.alone
        self._search.broke(attempt.replica, now)
        gained, unusable = self._grown > self._most, verdict is Verdict.UNUSABLE
        self._most = max(self._most, self._grown)
        # An engine that has handed over ends its answers for the other one to go on with; it gets no new ones.
        handed_over = verdict is Verdict.BROKEN and attempt.replica.line.state is Role.HANDOVER
        if gained and not unusable:
            self._gained()
        elif not handed_over:
            self._doubts.append(Doubt(attempt.replica, now, alone=alone))
            self._vain = (verdict, attempt.reason)
            self._junk += gained
            if self._junk >= self._ward.limits.breaks:
                return self._lost("limit", self._given_up())
        return self._go_on(_REASONS[verdict], attempt.reason)

    @property
    def _grown(self) -> int:
        """How far the answer has come: the events of a stream; of a whole answer, the bytes of its notes."""
        return self._kept.events if self._request.streaming else len(self._kept.rest)

    def _given_up(self) -> GatewayError:
        """The error of a request that has gone to so many workers in vain."""
        verdict, said = self._vain
        if self._delivery.delivered:
            return worker_lost(f"{said}; {max(self._barren, self._junk)} in a row brought no more of it")
        if verdict is Verdict.UNUSABLE:
            return unusable_answer(said)
        return worker_lost(said if self._ward.limits.resumes else f"{said}; {_OFF}", lost=self._report.attempts)

    def _go_on(self, reason: str, said: str) -> GatewayError | None:
        limits, kept = self._ward.limits, self._kept
        delivered = self._delivery.delivered
        if delivered and not kept.resumable:
            why = kept.unresumable or "off"
            off = "answers of this route are not resumed" if limits.resumes else _OFF
            because = off if why == "off" else _UNRESUMABLE.get(why.partition(":")[0])
            return self._lost(why, worker_lost(f"{said}; {because}" if because else said))
        self.resuming = delivered or (kept.resumable and not self._request.streaming and self._is_whole(kept))
        if self.resuming:
            self._reason = reason
            if delivered:
                self._stalled_since = self._stalled_since or self._report.last_event_at
            self._search.come_back(limit=limits.resume_wait, last=False)
        else:
            self._again()
        return None

    def _is_whole(self, kept: Kept) -> bool:
        """Whether there is something of a whole answer to go on with. Nothing of it was delivered, so no count and no
        checksum of events tell an engine that notes are missing, or are those of two attempts."""
        lines = kept.rest.count(b"\n")
        if lines != self._notes:
            logger.error("an answer's notes are not those that came (%d, not %d); it is run again", lines, self._notes)
            return False
        return lines > 0

    def _again(self) -> None:
        """The client has seen nothing: run from the start."""
        self.resuming = False
        self._search.come_back(limit=self._ward.limits.wait_for_worker, last=False)

    def _refused(self, attempt: Attempt) -> GatewayError | None:
        self._ward.events.resume_refused(attempt.reason or "status")
        self._resume_ended("refused")
        self._search.unresumed()
        if self._delivery.delivered:
            return self._lost("refused", worker_lost("another one could not go on exactly where it had stopped"))
        self._again()
        return None

    def _lost(self, reason: str, error: GatewayError) -> GatewayError:
        """``reason``: what follows a colon is for the access line alone."""
        self._report.lost = reason
        self._ward.events.lost(route=self._request.route.name, reason=reason.partition(":")[0])
        return error

    def ends_with(self, error: GatewayError) -> GatewayError:
        """What the client is told where the search for the next worker has failed."""
        if error.code in _NO_WORKER and self._delivery.delivered:
            return not_taken_up(self._ward.limits.resume_wait, full=error.code == "overloaded")
        return error

    def _resume_ended(self, outcome: str) -> None:
        reason, self._reason = self._reason, ""
        if reason:
            self._ward.events.resumed(route=self._request.route.name, reason=reason, outcome=outcome)

    def over(self, outcome: BaseException | None) -> None:
        """The request has ended, in whatever way. Idempotent."""
        self._over = True
        self._resume_ended("ended")
        if isinstance(outcome, GatewayError) and outcome.code in _NO_WORKER:
            self._lost("no_worker", outcome)

    # The next attempt

    @property
    def answer(self) -> Answer:
        return _Continued(self._delivery, self._further, self._continued)

    def sent(self) -> None:
        """The next attempt goes out."""
        self._count(1)

    def unsent(self) -> None:
        """It started nothing."""
        self._count(-1)

    def _count(self, number: int) -> None:
        if self.resuming:
            self._report.resumes += number
        else:
            self._report.retries += number

    def resume_request(self) -> tuple[bytes, bytes]:
        """Header lines and body of a resume."""
        request, kept = self._request, self._kept
        self._tokens = kept.tokens
        head = ResumeHead(
            events=kept.events, crc=kept.crc.decode(), notes=len(kept.rest), attempt=self._report.attempts + 1
        )
        body = encode_resume(head, kept.rest, kept.body)
        lines = upstream_headers(
            request.headers,
            length=len(body),
            client_id=request.request_id,
            gateway_id=request.gateway_id,
            notes=True,
            content_type=_RESUME,
        )
        return lines, body

    def _further(self) -> bool:
        """A worker's comments bring it no further; notes of whole answers do."""
        return self._grown > self._most or bool(self._kept.unresumable)

    def _continued(self) -> None:
        """More of the answer is there than ever before."""
        if self._stalled_since:
            self._ward.events.stalled(time.monotonic() - self._stalled_since)
            self._stalled_since = 0.0
        if self._reason:
            self._ward.events.replayed(self._tokens)
        self._resume_ended("resumed")
        self._gained()

    # Whether it is the request

    def _gained(self) -> None:
        self._barren = 0
        self._doubts.clear()
        self._standing = after(self._standing, Event.GAINED)
        self._search.cleared()

    @property
    def unsettled(self) -> bool:
        """Whether :meth:`settle` has something to say before the next attempt."""
        if self._standing is Standing.CLEAR and self._barren + len(self._doubts) < self._ward.limits.breaks:
            return len(self._doubts) > 1
        return bool(self._doubts)

    @property
    def _suspected(self) -> bool:
        return self._standing in _SUSPECTED

    async def settle(self, wait: Callable[[asyncio.Future[None]], Awaitable[None]]) -> None:
        """Wait until it is known whether this request's engines died; if they did, it runs alone from now on.

        Raises:
            GatewayError: 500 ``request_kills_worker``, or what else ends it.
            asyncio.CancelledError: the request has ended.
        """
        while self._doubts:
            doubt = self._doubts[0]
            died = await self._fate(doubt, wait) is Fate.DIED
            if self._doubts and self._doubts[0] is doubt:
                del self._doubts[0]
            if self._over:
                raise asyncio.CancelledError
            alone = doubt.alone and self._suspected
            event = Event.LIVED if not died else Event.DIED_ALONE if alone else Event.DIED
            self._standing = after(self._standing, event)
            if not died or not self._ward.limits.resumes:
                self._barren += 1
            if self._standing is Standing.CONVICTED:
                self._ward.refused.add(self._request.route.path, self._kept.body, time.monotonic())
                raise self._lost("poison", request_kills_worker(delivered=self._delivery.delivered))
        if self._barren >= self._ward.limits.breaks:
            self._reason = ""  # it does not go on to another worker after all
            raise self._lost("limit", self._given_up())
        if self._suspected:
            self._search.suspected(self._ward.suspects)
            self._search.come_back(limit=self._ward.limits.resume_wait, last=True)

    async def _fate(self, doubt: Doubt, wait: Callable[[asyncio.Future[None]], Awaitable[None]]) -> Fate:
        registry = self._ward.registry
        loop = asyncio.get_running_loop()
        deadline = doubt.at + FATE_SECONDS
        while (fate := registry.fate(doubt.replica, doubt.at)) is Fate.OPEN:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            changed = registry.changed()
            alarm = loop.call_later(left, _wake, changed)
            try:
                await wait(changed)
            finally:
                alarm.cancel()
        return fate


class _Continued:
    """An attempt's ``Answer`` after a break: says when the answer has come further than ever before."""

    __slots__ = ("_delivery", "_further", "_on_first")

    def __init__(self, delivery: Delivery, further: Callable[[], bool], on_first: Callable[[], None]) -> None:
        self._delivery = delivery
        self._further = further
        self._on_first: Callable[[], None] | None = on_first

    def _first(self) -> None:
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()

    @property
    def delivered(self) -> bool:
        return self._delivery.delivered

    def events(self, status: int, headers: list[Header], events: bytes) -> None:
        if self._on_first is not None and (self._further() or not self._delivery.delivered):
            self._first()
        self._delivery.events(status, headers, events)

    def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        self._first()
        self._delivery.whole(status, headers, body)

    def part(self, status: int, headers: list[Header], data: bytes, done: bool) -> None:
        self._first()
        self._delivery.part(status, headers, data, done)

    def noted(self) -> None:
        if self._on_first is not None and self._further():
            self._first()


_REASONS: Final = {Verdict.BROKEN: "connection", Verdict.SILENT: "silence", Verdict.UNUSABLE: "unusable"}
_OFF: Final = "answers are not resumed here (resume_limit is 0)"
_SUSPECTED: Final = frozenset((Standing.SUSPECT, Standing.ACCUSED, Standing.ACCUSED_TWICE))
_NO_WORKER: Final = frozenset(("no_worker", "overloaded"))
_UNRESUMABLE: Final = {
    "body": "the request was too large for another one to go on",
    "tokens": "the answer was too long for another one to go on",
    "notes": "the answer was too long for another one to go on",
    "engine": "another one could not go on exactly with an answer of this kind",
}
"""Why not, for the client, where there is more to say than that nothing was written down to go on from."""


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
