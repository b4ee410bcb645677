"""One request's search for a worker: who may take it now, who was tried, and how long it has been looking.

What concerns all requests, a replica's state and whether it is full, is kept where they share it; here is what this
request alone has seen: replicas that broke under it, could not be reached, or turned it away. Nothing here sends: the
relay asks, tries, and tells what became of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from app.fullness import FullReplicas
from app.liveness import ReplicaKey, clears_suspicion
from app.openai.errors import GatewayError, model_not_found, model_required, no_worker, workers_full
from app.registry import Replica, Waiter, WorkerRegistry
from app.routing import RoundRobinRouter

REST_SECONDS = 0.05
"""How long a replica that could not be reached is left alone by the request, at first; and at most."""
REST_LIMIT_SECONDS = 0.25

DECIDING_SECONDS = 1.0
"""So long a worker may take to refuse; what it takes longer counts as being queued there, and is no search."""


class Search:
    """``since`` is when the search began that goes on now; 0 while a worker has the request. Seconds."""

    def __init__(
        self,
        registry: WorkerRegistry,
        router: RoundRobinRouter,
        full: FullReplicas,
        model: str,
        *,
        order: int,
        limit: float,
    ) -> None:
        """``order``: the request's age among all; ``limit``: how long it may look."""
        self._registry = registry
        self._router = router
        self._full = full
        self._model = model
        self._order = order
        self._limit = limit
        self.since = 0.0
        self._broken: dict[ReplicaKey, float] = {}
        """Replicas that broke under this request, and when they did so last."""
        self._stale: set[ReplicaKey] = set()
        """Replicas that closed an idle connection under this request: it gets new ones there from now on, and on those
        an end is a break. Otherwise a request that kills its worker at once would cost nothing per idle connection."""
        self._resting: dict[ReplicaKey, float] = {}
        """Replicas that could not be reached just now, and until when they are left alone."""
        self._turned_away: set[ReplicaKey] = set()
        """Replicas whose last word to this request was that they are full."""
        self._rest_seconds = REST_SECONDS

    @property
    def until(self) -> float:
        """When the search that goes on ends in vain."""
        return self.since + self._limit

    # Who is next

    def find(self) -> Replica | None:
        """The replica to try now, if there is one.

        Raises:
            GatewayError: 404 ``model_not_found``, or 400 ``model_required``.
        """
        self.since = self.since or time.monotonic()
        model = self._model
        candidates = self._registry.candidates(model)
        if not candidates and self._registry.is_unknown(model):
            raise model_not_found(model)
        if not model and self._registry.mixed:
            raise model_required(sorted(self._registry.known_models()))
        found = self._router.select(candidates, self._avoided(), key=_key, group=model)
        if found is None and self._broken:
            refused = {replica.key for replica in candidates if not self._accepts(replica)}
            found = self._router.select(candidates, refused, key=_key, group=model)
        return found

    def elsewhere(self, replica: Replica) -> bool:
        """Whether another one could take the request."""
        shunned = self._avoided() | {replica.key}
        return any(other.key not in shunned for other in self._registry.candidates(self._model))

    def may_reuse(self, replica: Replica) -> bool:
        """Whether an idle connection will do there."""
        return replica.key not in self._stale

    def _avoided(self) -> set[Hashable]:
        """Replicas to avoid while there are others."""
        return {*self._broken, *self._resting, *self._full.resting(time.monotonic())}

    def _accepts(self, replica: Replica) -> bool:
        """Whether this replica may be tried, if it is routable.

        One that broke under this request may be tried again once its watch has spoken later than the break: it lived
        on, and only a connection, or the network, had failed. Attempts stay limited.
        """
        if replica.key in self._resting or self._full.rests(replica.key, time.monotonic()):
            return False
        broke_at = self._broken.get(replica.key)
        return broke_at is None or clears_suspicion(broke_at, replica.line_at)

    # What became of a try

    def unreached(self, replica: Replica) -> None:
        """Leave it alone for a moment. Costs no attempt, but time of the search."""
        self._turned_away.discard(replica.key)
        self._resting[replica.key] = time.monotonic() + self._rest_seconds
        self._rest_seconds = min(self._rest_seconds * 1.5, REST_LIMIT_SECONDS)

    def refused(self, replica: Replica) -> None:
        """It started nothing: it is full, or about to leave."""
        self._turned_away.add(replica.key)
        self._full.refused(replica.key, time.monotonic())

    def stale(self, replica: Replica) -> None:
        """An idle connection was being closed there."""
        self._stale.add(replica.key)

    def tried(self, seconds: float) -> None:
        """Nothing was started by a try that took so long."""
        if seconds > DECIDING_SECONDS:  # queued there, until the engine died
            self.since += seconds

    def broke(self, replica: Replica) -> None:
        """It broke under the request: others first from now on."""
        self._broken[replica.key] = time.monotonic()
        self._turned_away.discard(replica.key)
        self.since = 0.0

    def took(self, replica: Replica) -> None:
        """It answered."""
        self._full.took(replica.key)
        self.since = 0.0

    # Waiting

    @contextmanager
    def waiting(self) -> Iterator[asyncio.Future[None]]:
        """Within, the request waits for a worker; the future is done when it is time to look again.

        Raises:
            GatewayError: it has looked for long enough: 503 ``no_worker`` or 429 ``overloaded``.
        """
        now = time.monotonic()
        remaining = self.until - now
        if remaining <= 0:
            raise self._in_vain(now)
        rests = [*self._resting.values()]
        round_at = self._full.next_round(now)
        if round_at is not None:
            rests.append(round_at)
        if rests:
            remaining = min(remaining, max(0.001, min(rests) + 0.001 - now))  # timers have whole milliseconds
        waiter = self._registry.wait(self._order, self._model, self._accepts)
        alarm = asyncio.get_running_loop().call_later(remaining, self._wake, waiter)
        try:
            yield waiter.future
        finally:
            alarm.cancel()
            self._registry.forget(waiter)
        now = time.monotonic()
        self._resting = {key: until for key, until in self._resting.items() if until > now}

    def _wake(self, waiter: Waiter) -> None:
        """The first alarm of a round wakes all, oldest first: none gets ahead because its timer was a bit earlier."""
        if waiter.future.done():
            return
        self._registry.look_again()
        if not waiter.future.done():
            waiter.future.set_result(None)

    def _in_vain(self, now: float) -> GatewayError:
        """Why nobody took the request: full, if that is what all workers said that it could still go to."""
        asked = {replica.key for replica in self._registry.candidates(self._model)}
        full = asked & (self._turned_away | self._full.resting(now))
        if full and not asked - full - set(self._broken):
            return workers_full(self._limit, self._model)
        return no_worker(self._limit, self._model)


def _key(replica: Replica) -> ReplicaKey:
    return replica.key
