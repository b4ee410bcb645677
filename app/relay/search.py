"""One request's search for a worker: who may take it now, who was tried, and how long it has been looking.

What concerns all requests, a replica's state and its room, is kept where they share it; here is what this request alone
has seen: replicas that broke under it, could not be reached, or turned it away. One whose worker broke, and had a
spare, waits a moment for that one, where its KV cache may be, before it goes to another worker. What a search finds is
a *place* at a replica, which it holds until that try is over. Nothing here sends: the relay asks, tries, and tells what
became of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.fleet.liveness import ReplicaKey, clears_suspicion
from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.fleet.routing import RoundRobinRouter
from app.openai.errors import GatewayError, model_not_found, model_required, no_worker, workers_full
from app.relay.deadlines import DECIDING_SECONDS
from app.relay.poison import Suspects
from app.relay.waiting import Waiter, WaitQueue
from workers.contract import Role

RETURNING = 1 << 48
"""Puts requests that come back before all others in line, and leaves them in order among themselves."""

REST_SECONDS = 0.05
"""How long a replica that could not be reached is left alone by the request, at first; and at most."""
REST_LIMIT_SECONDS = 0.25

BACK_SECONDS = 1.0
BACK_SPREAD_SECONDS = 2.0
"""When to come back after no worker was there: nothing tells when one will be, so this only keeps clients apart."""


class Search:
    """``since`` is when the search began that goes on now; 0 while a worker has the request. ``waited``: how long the
    request stood in line, in all. Seconds. Call :meth:`end` at the request's end."""

    __slots__ = (
        "_broken",
        "_held",
        "_home",
        "_home_seconds",
        "_home_until",
        "_in_line",
        "_in_line_since",
        "_limit",
        "_model",
        "_new",
        "_over",
        "_queue",
        "_registry",
        "_rest_seconds",
        "_resting",
        "_returning",
        "_router",
        "_stale",
        "_suspects",
        "_turned_away",
        "order",
        "since",
        "waited",
    )

    def __init__(
        self,
        registry: WorkerRegistry,
        router: RoundRobinRouter,
        queue: WaitQueue,
        model: str,
        *,
        order: int,
        limit: float,
        home: float = 0.0,
    ) -> None:
        """``order``: the request's age among all, above 0; ``limit``: how long it may look; ``home``: how long, of
        that, only for the spare of the worker that broke under it."""
        self._registry = registry
        self._router = router
        self._queue = queue
        self._model = model
        self.order = order
        self._limit = limit
        self._home_seconds = home
        self._home: Replica | None = None
        """The one that broke and whose spare is waited for, until then."""
        self._home_until = 0.0
        self.since = 0.0
        self.waited = 0.0
        self._returning = False
        """Its worker broke under it: it comes before all others."""
        self._new = True
        """Nobody has let it in yet: neither a worker nor the line."""
        self._held: Replica | None = None
        """Where it has a place."""
        self._suspects: Suspects | None = None
        """It is a suspect, and goes where there is no other one."""
        self._over = False
        """The request has ended: it takes no place any more, and stands in no line."""
        self._in_line: Waiter | None = None
        self._in_line_since = 0.0
        self._broken: dict[ReplicaKey, float] = {}
        """Replicas that broke under this request, and when they did so last."""
        self._stale = False
        """A replica closed an idle connection under this request. It gets new ones from now on, as one does whose
        worker broke, and on those an end is a break. Otherwise a request that kills its worker at once would cost
        nothing per idle connection."""
        self._resting: dict[ReplicaKey, float] = {}
        """Replicas that could not be reached just now, and until when they are left alone."""
        self._turned_away: set[ReplicaKey] = set()
        """Replicas whose last word to this request was that they are full."""
        self._rest_seconds = REST_SECONDS

    @property
    def until(self) -> float:
        """When the search that goes on ends in vain. A suspect's time counts from the last time that one moved."""
        suspects = self._suspects
        return (self.since if suspects is None else max(self.since, suspects.moved_at)) + self._limit

    @property
    def alone(self) -> bool:
        """Whether it is at a worker as the only suspect there."""
        return self._suspects is not None and self._held is not None

    # Who is next

    def find(self) -> Replica | None:
        """The replica to try now, if there is one: a place there is held for the request.

        Raises:
            GatewayError: 404 ``model_not_found``, or 400 ``model_required``.
        """
        held = self._held
        if held is not None:
            return held
        now = time.monotonic()
        self.since = self.since or now
        if self._queue.waiting:
            self._queue.hand_out()  # those first whose time has just come
            if self._new and self._queue.holds_up(self._model, now):
                return None
        if not self._model and self._registry.mixed:
            raise model_required(sorted(self._registry.known_models()))
        found = self._take(now)
        if found is None and self._registry.is_unknown(self._model):
            raise model_not_found(self._model)
        return found

    def _take(self, now: float) -> Replica | None:
        """Take a place, if there is one for this request."""
        if self._over:
            return None
        candidates = self._registry.candidates(self._model)
        if self._home is not None:
            candidates = self._at_home(self._home, candidates, now)
        if self._broken or self._resting or self._returning or self._suspects is not None:
            found = self._router.select(candidates, lambda r: self._prefers(r, now), group=self._model)
            if found is None and self._broken:
                found = self._router.select(candidates, lambda r: self._accepts(r, now), group=self._model)
        else:
            found = self._router.select(candidates, lambda r: r.room.open(now), group=self._model)
        if found is not None:
            found.room.take(now)
            if self._returning:
                found.resumes.take(now)
            self._queue.load(self._model).served.began(now)
            self._held = found
            self._new = False
            if self._suspects is not None:
                self._suspects.enter(found.key, self.order)
        return found

    def _at_home(self, broken: Replica, candidates: tuple[Replica, ...], now: float) -> tuple[Replica, ...]:
        """Of the candidates the spare that has taken over; all of them once it is not waited for any more: since it
        took too long, or the one that broke is there after all."""
        lives = broken.connected and clears_suspicion(self._broken.get(broken.key, now), broken.line_at)
        if lives or now >= self._home_until:
            self._home = None
            return candidates
        return tuple(one for one in candidates if one.key[:2] == broken.key[:2] and one.key != broken.key)

    def _takes(self, now: float) -> bool:
        """The same, for the line."""
        return self._take(now) is not None

    def _prefers(self, replica: Replica, now: float) -> bool:
        """Whether to try this one before others."""
        return replica.key not in self._broken and self._accepts(replica, now)

    def _accepts(self, replica: Replica, now: float) -> bool:
        """Whether this replica may be tried, if it is routable.

        One that broke under this request may be tried again once its watch has spoken later than the break: it lived
        on, and only a connection, or the network, had failed. Attempts stay limited.
        """
        if self._returning:
            if not (replica.resumes.open(now) and replica.room.open_to_returning(now)):
                return False
        elif not replica.room.open(now):
            return False
        if self._resting.get(replica.key, 0.0) > now:
            return False
        if self._suspects is not None and not self._suspects.admits(replica.key):
            return False
        broke_at = self._broken.get(replica.key)
        return broke_at is None or clears_suspicion(broke_at, replica.line_at)

    def elsewhere(self, replica: Replica) -> bool:
        """Whether another one could take the request."""
        now = time.monotonic()
        others = self._registry.candidates(self._model)
        return any(other.key != replica.key and self._prefers(other, now) for other in others)

    def may_reuse(self) -> bool:
        """Whether an idle connection will do."""
        return not (self._stale or self._broken)

    # What became of a try: each gives the place back

    def unreached(self, replica: Replica) -> None:
        """Leave it alone for a moment. Costs no attempt, but time of the search."""
        now = time.monotonic()
        self._turned_away.discard(replica.key)
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._resting[replica.key] = now + self._rest_seconds
        self._rest_seconds = min(self._rest_seconds * 1.5, REST_LIMIT_SECONDS)
        self._give_back()

    def refused(self, replica: Replica) -> None:
        """It started nothing: it is full, or about to leave."""
        self._turned_away.add(replica.key)
        self._give_back(refused=True)

    def stale(self) -> None:
        """An idle connection was being closed there."""
        self._stale = True
        self._give_back()

    def tried(self, seconds: float) -> None:
        """Nothing was started by a try that took so long."""
        if seconds > DECIDING_SECONDS:  # queued there, until the engine died
            self.since += seconds

    def broke(self, replica: Replica, now: float) -> None:
        """It broke under the request: others first from now on."""
        self._broken[replica.key] = now
        self._turned_away.discard(replica.key)
        if self._home_seconds and replica.line.standby is Role.STANDBY:
            self._home, self._home_until = replica, now + self._home_seconds
        self.since = 0.0
        self._give_back()

    def unresumed(self) -> None:
        """It would not go on with the answer that another one had begun."""
        self._home = None
        self.since = 0.0
        self._give_back()

    def come_back(self, *, limit: float, last: bool) -> None:
        """The request is to be started once more, and may look for so many seconds. It comes before all that have not
        been interrupted; ``last``: when it is its turn by its age."""
        self._returning = not last
        self._limit = limit

    def suspected(self, suspects: Suspects) -> None:
        """From the next try on it goes where there is no other suspect, and for that it waits as long as it takes."""
        self._suspects = suspects

    def cleared(self) -> None:
        """It is no suspect any more; it may be at a worker. Idempotent."""
        suspects, self._suspects = self._suspects, None
        if suspects is not None and self._held is not None:
            suspects.leave(self._held.key, self.order, time.monotonic())
            if self._queue.waiting:
                self._queue.hand_out()

    def took(self, replica: Replica) -> None:
        """It answered, to the end."""
        replica.room.answered()
        self.since = 0.0
        self._give_back(completed=True)

    def end(self) -> None:
        """The request is over, whatever happened. Idempotent."""
        self._over = True
        self._leave()
        self._give_back()

    def _give_back(self, *, completed: bool = False, refused: bool = False) -> None:
        replica, self._held = self._held, None
        if replica is None:
            return
        now = time.monotonic()
        if self._suspects is not None:
            self._suspects.leave(replica.key, self.order, now)
        if refused:
            replica.room.refused(now)
        else:
            replica.room.free(now)
        self._queue.load(self._model).served.ended(now, completed=completed)
        if self._queue.waiting:
            self._queue.hand_out()

    # Waiting

    @contextmanager
    def waiting(self) -> Iterator[asyncio.Future[None]]:
        """Within, the request stands in line; the future is done when it has a place, or should look again.

        Raises:
            GatewayError: it has looked for long enough: 503 ``no_worker`` or 429 ``overloaded``; or 429 at once, if the
                line is full.
            asyncio.CancelledError: the request has ended.
        """
        if self._over:
            raise asyncio.CancelledError
        now = time.monotonic()
        if self._behind_suspects():
            self.since = now
        due = min([self.until, *(until for until in self._resting.values() if until > now)])
        if self._home is not None:
            due = min(due, max(now, self._home_until))
        if self.until <= now:
            raise self._in_vain()
        loop = asyncio.get_running_loop()
        order = self.order - RETURNING if self._returning else self.order
        waiter = Waiter(order, self._model, self._takes, loop.create_future(), self._returning)
        self._queue.enter(waiter, new=self._new)
        self._new = False
        self._in_line, self._in_line_since = waiter, now
        alarm = loop.call_later(max(0.001, due + 0.001 - now), _wake, waiter)  # timers have whole milliseconds
        try:
            yield waiter.future
        finally:
            alarm.cancel()
            self._leave()

    def _leave(self) -> None:
        waiter, self._in_line = self._in_line, None
        if waiter is not None:
            self._queue.leave(waiter)
            self.waited += time.monotonic() - self._in_line_since

    def _behind_suspects(self) -> bool:
        """Whether a suspect is where this one could go: that takes as long as it takes, and no worker is missing."""
        suspects = self._suspects
        if suspects is None:
            return False
        return any(not suspects.admits(replica.key) for replica in self._registry.candidates(self._model))

    def _in_vain(self) -> GatewayError:
        """Why nobody took the request: full, if that is so of all workers that it could still go to."""
        candidates = self._registry.candidates(self._model)
        full = [r for r in candidates if r.key in self._turned_away or r.room.full]
        if full and all(r in full or r.key in self._broken for r in candidates):
            return workers_full(self._limit, self._model, retry_after=self._queue.retry_after(self._model))
        back = BACK_SECONDS + BACK_SPREAD_SECONDS * random.random()  # noqa: S311
        return no_worker(self._limit, self._model, retry_after=back)


def _wake(waiter: Waiter) -> None:
    if not waiter.future.done():
        waiter.future.set_result(None)
