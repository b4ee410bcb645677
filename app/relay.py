"""The one loop every relayed request runs through: select a worker, send, relay, and select again if it breaks.

Independent of the transport: the client is a ``Downstream``, workers are ``upstream`` connections. Bytes pass through
``Attempt`` and ``Delivery`` within the callback that brought them; the coroutine only waits for verdicts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from app.attempt import Attempt, Verdict
from app.delivery import Delivery
from app.downstream import ClientGone, Downstream
from app.fullness import FullReplicas
from app.headers import upstream_headers
from app.liveness import ReplicaKey, clears_suspicion
from app.openai.errors import GatewayError, model_not_found, no_worker, worker_lost, workers_full
from app.registry import Replica, Waiter, WorkerRegistry
from app.relayed import RelayRequest, Report
from app.routing import RoundRobinRouter
from app.upstream import UpstreamConnection, UpstreamError

T = TypeVar("T")

REST_SECONDS = 0.05
"""How long a replica that could not be reached is left alone by the request, at first; and at most."""
REST_LIMIT_SECONDS = 0.25
STALL_LIMITS_WITHOUT_ALTERNATIVE = 3
"""A silent worker is left at the limit only for another one. Alone it gets this many limits: by then (180 s) its keeper
has replaced an engine that is stuck (120 s without a step), and the request ran again there."""

DECIDING_SECONDS = 1.0
"""A first keep-alive that is due so shortly before the wait for a worker ends, or after it, holds back: it would take
the answer's real status away. And so long a worker may take to refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Durations in seconds."""

    wait_for_worker: float
    first_byte: float
    stall: float
    keepalive: float
    attempts: int
    max_held_bytes: int


class Relay:
    """Runs exchanges, and can end those that are left when the drain's time is over."""

    def __init__(self, *, registry: WorkerRegistry, router: RoundRobinRouter, limits: RelayLimits) -> None:
        self.registry = registry
        self.router = router
        self.limits = limits
        self.full = FullReplicas()
        self._exchanges: set[Exchange] = set()
        self._arrivals = 0

    async def run(self, request: RelayRequest, downstream: Downstream, report: Report) -> None:
        """Answer one request. Errors become answers; only bugs and cancellation come out."""
        self._arrivals += 1
        exchange = Exchange(self, request, downstream, report, order=self._arrivals)
        self._exchanges.add(exchange)
        try:
            await exchange.run()
        finally:
            self._exchanges.discard(exchange)

    def interrupt_all(self, error: GatewayError) -> int:
        """End every running exchange with this error; returns how many there were."""
        running = list(self._exchanges)
        for exchange in running:
            exchange.interrupt(error)
        return len(running)


class Exchange:
    """One request on its way: a ``DownstreamObserver``."""

    def __init__(
        self, relay: Relay, request: RelayRequest, downstream: Downstream, report: Report, *, order: int
    ) -> None:
        self._registry = relay.registry
        self._router = relay.router
        self._full = relay.full
        self._limits = relay.limits
        self._request = request
        self._downstream = downstream
        self._report = report
        self._order = order
        self._lines = b""
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
        self._waiting_since = 0.0
        """When the search for a worker that takes the request began; 0 once one took it. Later by the time that workers
        spent on it before they refused after all."""
        self._attempt_since = 0.0
        self._attempt: Attempt | None = None
        self._pending: asyncio.Future[object] | None = None
        self._stopped: ClientGone | GatewayError | None = None
        self._paused = False
        self._delivery = Delivery(request, downstream, report)
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        self._downstream.observe(self)
        self._arm()
        try:
            await self._serve()
        except ClientGone:
            self._report.disconnected = True
        except GatewayError as error:
            self._delivery.fail(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._attempt is not None:
                self._attempt.drop()
                self._attempt = None

    # The loop

    async def _serve(self) -> None:
        request = self._request
        self._lines = upstream_headers(
            request.headers, length=len(request.body), client_id=request.request_id, gateway_id=request.gateway_id
        )
        while True:
            self._waiting_since = self._waiting_since or time.monotonic()
            replica = self._select()
            if replica is None:
                await self._wait_for_worker()
                continue
            idle = None if replica.key in self._stale else replica.pool.take()
            connection = idle or await self._connect(replica)
            if connection is None:
                self._rest(replica)
                continue
            verdict, reason = await self._try(replica, connection)
            if verdict is Verdict.FINISHED:
                self._downstream.end()
                return
            if verdict is Verdict.RESELECT:
                self._turned_away.add(replica.key)
                self._full.refused(replica.key, time.monotonic())
            elif verdict is Verdict.UNSENT:
                self._rest(replica)
            elif verdict is Verdict.STALE:
                self._stale.add(replica.key)
            elif verdict is Verdict.BROKEN:
                self._broke(replica, reason)

    def _select(self) -> Replica | None:
        model = self._request.model
        candidates = self._registry.candidates(model)
        if not candidates and self._registry.is_unknown(model):
            raise model_not_found(model)
        found = self._router.select(candidates, self._excluded(), key=_key, group=model)
        if found is None and self._broken:
            refused = {replica.key for replica in candidates if not self._accepts(replica)}
            found = self._router.select(candidates, refused, key=_key, group=model)
        return found

    def _excluded(self) -> set[Hashable]:
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

    def _rest(self, replica: Replica) -> None:
        """This replica was not reached: leave it alone for a moment. Costs no attempt, but time of the wait."""
        self._turned_away.discard(replica.key)
        self._resting[replica.key] = time.monotonic() + self._rest_seconds
        self._rest_seconds = min(self._rest_seconds * 1.5, REST_LIMIT_SECONDS)

    def _broke(self, replica: Replica, reason: str) -> None:
        """The worker broke under the request. Go on if the client has seen nothing, first of all elsewhere."""
        self._broken[replica.key] = time.monotonic()
        self._turned_away.discard(replica.key)
        self._waiting_since = 0.0
        if self._delivery.delivered or self._report.attempts >= self._limits.attempts:
            raise worker_lost(reason)
        self._report.retries += 1

    async def _wait_for_worker(self) -> None:
        now = time.monotonic()
        remaining = self._waiting_since + self._limits.wait_for_worker - now
        if remaining <= 0:
            raise self._in_vain(now)
        rests = [*self._resting.values()]
        round_at = self._full.next_round(now)
        if round_at is not None:
            rests.append(round_at)
        if rests:
            remaining = min(remaining, max(0.001, min(rests) + 0.001 - now))  # timers have whole milliseconds
        waiter = self._registry.wait(self._order, self._request.model, self._accepts)
        alarm = asyncio.get_running_loop().call_later(remaining, self._wake, waiter)
        try:
            await self._wait(waiter.future)
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
        waited, model = self._limits.wait_for_worker, self._request.model
        asked = {replica.key for replica in self._registry.candidates(model)}
        full = asked & (self._turned_away | self._full.resting(now))
        return (
            workers_full(waited, model) if full and not asked - full - set(self._broken) else no_worker(waited, model)
        )

    async def _connect(self, replica: Replica) -> UpstreamConnection | None:
        try:
            return await self._wait(replica.pool.open())
        except UpstreamError:
            return None

    async def _try(self, replica: Replica, connection: UpstreamConnection) -> tuple[Verdict, str]:
        request = self._request
        attempt = Attempt(replica, connection, request.route, self._delivery, max_held=self._limits.max_held_bytes)
        self._attempt = attempt
        self._attempt_since = time.monotonic()
        self._report.attempts += 1
        self._report.worker = replica.key.worker
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (request.target, str(replica.address).encode("ascii", "replace"))
        attempt.start(b"".join((head, self._lines, b"\r\n", request.body)), paused=self._paused)
        verdict = await self._wait(attempt.verdict)
        attempt.drop()
        self._attempt = None
        if verdict in (Verdict.RESELECT, Verdict.UNSENT, Verdict.STALE):
            self._report.attempts -= 1  # nothing was started there
            spent = time.monotonic() - self._attempt_since
            if spent > DECIDING_SECONDS:  # queued there, until the engine died: this was no search
                self._waiting_since += spent
        else:
            self._waiting_since = 0.0
            if verdict is Verdict.FINISHED:
                self._full.took(replica.key)
        return verdict, attempt.reason

    async def _wait(self, future: asyncio.Future[T]) -> T:
        """Wait for something that the client's leaving, or the end of the drain, may cut short."""
        if self._stopped is not None:
            future.cancel()
            raise self._stopped
        self._pending = future  # type: ignore[assignment]  # only ever failed through this name
        try:
            return await self._downstream.pump(future)
        finally:
            self._pending = None

    # DownstreamObserver, and the drain's end

    def client_gone(self) -> None:
        self._stop(ClientGone())

    def interrupt(self, error: GatewayError) -> None:
        self._stop(error)

    def _stop(self, error: ClientGone | GatewayError) -> None:
        if self._stopped is not None:
            return
        self._stopped = error
        if self._attempt is not None:
            self._attempt.drop()
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)

    def pause(self) -> None:
        self._paused = True
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        self._paused = False
        if self._attempt is not None:
            self._attempt.progress_at = time.monotonic()
            self._attempt.resume()

    # Deadlines: one timer per request, for the nearest of them

    def _arm(self) -> None:
        now = time.monotonic()
        limits = self._limits
        due = now + min(limits.first_byte, limits.stall)
        if self._request.streaming:
            due = min(due, max(self._keep_alive_due(now), now + 0.05))
        if self._attempt is not None and not self._paused:
            due = min(due, max(self._silent_until(self._attempt), now + 0.05))
        self._timer = asyncio.get_running_loop().call_later(max(0.001, due - now), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._timer = None
        if self._request.streaming and now >= self._keep_alive_due(now) and not self._paused:
            self._delivery.keep_alive()
        if self._attempt is not None and not self._paused and now >= self._silent_until(self._attempt):
            self._check_silence(self._attempt, now)
        self._arm()

    def _keep_alive_due(self, now: float) -> float:
        """The search for a worker is decided first, if it ends about when the first keep-alive is due. A worker that
        has the request may refuse it too; one that has not within a moment is taken to be at work."""
        due = self._delivery.sent_at + self._limits.keepalive
        if self._delivery.head_sent or not self._waiting_since:
            return due
        if self._waiting_since + self._limits.wait_for_worker > due + DECIDING_SECONDS:
            return due
        return max(due, (now if self._attempt is None else self._attempt_since) + DECIDING_SECONDS)

    def _limit(self, attempt: Attempt) -> float:
        return self._limits.stall if attempt.responded else self._limits.first_byte

    def _silent_until(self, attempt: Attempt) -> float:
        """When this attempt has been silent for too long. Steps of the engine count as a sign of life."""
        return max(attempt.progress_at, attempt.replica.steps_at) + self._limit(attempt)

    def _check_silence(self, attempt: Attempt, now: float) -> None:
        limit = self._limit(attempt)
        overdue = now - self._silent_until(attempt)
        shunned = self._excluded() | {attempt.replica.key}
        elsewhere = any(r.key not in shunned for r in self._registry.candidates(self._request.model))
        if elsewhere or overdue >= (STALL_LIMITS_WITHOUT_ALTERNATIVE - 1) * limit:
            attempt.give_up(f"no sign of life for {limit:g} s")


def _key(replica: Replica) -> ReplicaKey:
    return replica.key
