"""The one loop every relayed request runs through: select a worker, send, relay, and select again if it breaks.

Independent of the transport: the client is a ``Downstream``, workers are ``upstream`` connections. Nothing here is a
coroutine but the search for a worker, where there is something to wait for. In the usual case, an idle connection to a
routable worker, a request is sent, answered and ended within the callbacks that brought its bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from app.each import each
from app.fleet.registry import Replica, WorkerRegistry
from app.fleet.routing import RoundRobinRouter
from app.fleet.worker_token import WorkerToken
from app.openai.errors import GatewayError, internal, worker_lost
from app.relay.attempt import Attempt, Verdict
from app.relay.delivery import Delivery
from app.relay.downstream import ClientGone, Downstream
from app.relay.headers import upstream_headers
from app.relay.relayed import RelayRequest, Report
from app.relay.search import DECIDING_SECONDS, Search
from app.relay.upstream import UpstreamConnection, UpstreamError
from app.relay.waiting import WaitQueue

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAITING_KEEPALIVE_SECONDS = 5.0
"""A client whose stream waits for a worker is told more often that it was not forgotten."""

STALL_LIMITS_WITHOUT_ALTERNATIVE = 3
"""A silent worker is left at the limit only for another one. Alone it gets this many limits: by then (180 s) its keeper
has replaced an engine that is stuck (120 s without a step), and the request ran again there."""

LONGEST_TIMER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Durations in seconds; ``first_byte`` and ``stall`` may be infinite."""

    wait_for_worker: float
    first_byte: float
    stall: float
    keepalive: float
    attempts: int
    max_held_bytes: int
    first_look: float = field(init=False)
    """When a new request's deadlines are looked at first."""
    first_look_streaming: float = field(init=False)

    def __post_init__(self) -> None:
        whole = min(self.first_byte, self.stall, LONGEST_TIMER_SECONDS)
        object.__setattr__(self, "first_look", max(0.001, whole))
        object.__setattr__(self, "first_look_streaming", max(0.001, min(whole, max(self.keepalive, 0.05))))


class Relay:
    """Runs exchanges, and can end those that are left when the drain's time is over."""

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        router: RoundRobinRouter,
        queue: WaitQueue,
        limits: RelayLimits,
        token: WorkerToken | None = None,
    ) -> None:
        self.registry = registry
        self.token = token or WorkerToken()
        self.router = router
        self.queue = queue
        self.limits = limits
        self._exchanges: set[Exchange] = set()
        self._searches: set[asyncio.Task[None]] = set()
        self._arrivals = 0
        self._over: GatewayError | None = None

    def start(
        self, request: RelayRequest, downstream: Downstream, report: Report, on_end: Callable[[], None]
    ) -> Exchange:
        """Answer one request; ``on_end`` is called once, when ``downstream`` was told everything, possibly at once.
        Errors become answers."""
        self._arrivals += 1
        exchange = Exchange(self, request, downstream, report, order=self._arrivals, on_end=on_end)
        self._exchanges.add(exchange)
        try:
            if self._over is not None:
                exchange.interrupt(self._over)
            else:
                exchange.start()
        except Exception:
            exchange.drop()
            raise
        return exchange

    def ended(self, exchange: Exchange) -> None:
        self._exchanges.discard(exchange)

    def own(self, task: asyncio.Task[None]) -> None:
        """Keep a search alive until it is over."""
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)

    def interrupt_all(self, error: GatewayError) -> int:
        """End every exchange with this error, those too that have yet to begin; returns how many were running."""
        self._over = error
        running = list(self._exchanges)
        each([partial(exchange.interrupt, error) for exchange in running])
        return len(running)


class Exchange:
    """One request on its way: a ``DownstreamObserver``."""

    __slots__ = (
        "_attempt",
        "_attempt_since",
        "_delivery",
        "_downstream",
        "_ended",
        "_limits",
        "_lines",
        "_on_end",
        "_paused",
        "_pending",
        "_registry",
        "_relay",
        "_report",
        "_request",
        "_search",
        "_timer",
        "_token",
    )

    def __init__(
        self,
        relay: Relay,
        request: RelayRequest,
        downstream: Downstream,
        report: Report,
        *,
        order: int,
        on_end: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._on_end = on_end
        self._limits = relay.limits
        self._request = request
        self._downstream = downstream
        self._report = report
        self._search = Search(
            relay.registry,
            relay.router,
            relay.queue,
            request.model,
            order=order,
            limit=relay.limits.wait_for_worker,
        )
        self._lines = b""
        self._token = relay.token
        self._registry = relay.registry
        self._attempt_since = 0.0
        self._attempt: Attempt | None = None
        self._pending: asyncio.Future[Any] | None = None
        self._ended = False
        self._paused = False
        self._delivery = Delivery(request, downstream, report)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        request = self._request
        self._lines = upstream_headers(
            request.headers,
            length=len(request.body),
            client_id=request.request_id,
            gateway_id=request.gateway_id,
            streaming=request.streaming,
        )
        limits = self._limits
        due = limits.first_look_streaming if request.streaming else limits.first_look
        self._timer = asyncio.get_running_loop().call_later(due, self._tick)
        self._downstream.observe(self)
        if self._ended:
            return
        try:
            replica = self._search.find()
        except GatewayError as error:
            self._end(error)
            return
        connection = None if replica is None else replica.pool.take()
        if replica is not None and connection is not None:
            self._try(replica, connection)
        else:
            self._look(replica)

    @property
    def ended(self) -> bool:
        return self._ended

    def drop(self) -> None:
        """Let go of everything, and tell nobody."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.drop()
        if self._pending is not None and not self._pending.done():
            self._pending.cancel()
        self._search.end()
        self._report.waited = self._search.waited
        self._relay.ended(self)

    def _end(self, outcome: ClientGone | GatewayError | None) -> None:
        """The last thing that happens to an exchange; later ones change nothing."""
        if self._ended:
            return
        self.drop()
        if outcome is None:
            self._downstream.end()
        elif isinstance(outcome, GatewayError):
            outcome.__traceback__ = None  # its frames would keep all of this until the collector comes
            self._delivery.fail(outcome)
        else:
            self._report.disconnected = True
        self._on_end()

    # The search for a worker

    def _look(self, first: Replica | None = None) -> None:
        """Look for a worker in a task of its own, beginning with ``first``."""
        self._relay.own(asyncio.get_running_loop().create_task(self._until_sent(first)))

    async def _until_sent(self, replica: Replica | None) -> None:
        search = self._search
        try:
            while not self._ended:
                replica = replica or search.find()
                if replica is None:
                    with search.waiting() as woken:
                        await self._wait(woken)
                    continue
                idle = replica.pool.take() if search.may_reuse(replica) else None
                connection = idle or await self._connect(replica)
                if connection is not None:
                    self._try(replica, connection)
                    return
                search.unreached(replica)
                replica = None
        except GatewayError as error:
            self._end(error)
        except Exception:
            logger.exception("a request failed while it looked for a worker")
            self._end(internal())

    def _concluded(self, verdict: Verdict) -> None:
        """What became of the attempt, said in the callback that brought its last bytes."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        search, replica = self._search, attempt.replica
        if verdict is Verdict.FINISHED:
            search.took(replica)
            self._end(None)
            return
        if verdict is Verdict.BROKEN:
            try:
                self._broke(replica, attempt.reason)
            except GatewayError as error:
                self._end(error)
                return
        else:
            self._report.attempts -= 1  # nothing was started there
            search.tried(time.monotonic() - self._attempt_since)
            if verdict is Verdict.RESELECT:
                search.refused(replica)
            elif verdict is Verdict.UNTRUSTED:
                self._registry.distrusted(replica)
                search.unreached(replica)
            elif verdict is Verdict.UNSENT:
                search.unreached(replica)
            else:
                search.stale(replica)
        self._look()

    def _broke(self, replica: Replica, reason: str) -> None:
        """The worker broke under the request. Go on if the client has seen nothing, first of all elsewhere."""
        self._search.broke(replica)
        if self._delivery.delivered or self._report.attempts >= self._limits.attempts:
            raise worker_lost(reason)
        self._report.retries += 1

    async def _connect(self, replica: Replica) -> UpstreamConnection | None:
        """``None`` if it cannot be had, or is not wanted any more."""
        try:
            connection = await self._wait(replica.pool.open())
        except UpstreamError:
            return None
        if self._ended:
            replica.pool.give_back(connection)
            return None
        return connection

    def _try(self, replica: Replica, connection: UpstreamConnection) -> None:
        request = self._request
        self._attempt = attempt = Attempt(
            replica,
            connection,
            request.route,
            self._delivery,
            max_held=self._limits.max_held_bytes,
            on_verdict=self._concluded,
        )
        self._attempt_since = attempt.progress_at
        self._report.attempts += 1
        self._report.worker, self._report.epoch = replica.key.worker, replica.key.epoch
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (request.target, replica.pool.host_header)
        attempt.start(b"".join((head, self._lines, self._token.last_lines, request.body)), paused=self._paused)

    async def _wait(self, future: asyncio.Future[T]) -> T:
        """Wait for something that the exchange's end cuts short, by cancelling it.

        Raises:
            asyncio.CancelledError: it was; the search has nothing left to do.
        """
        self._pending = future
        try:
            return await future
        finally:
            self._pending = None

    # DownstreamObserver, and the drain's end

    def client_gone(self) -> None:
        self._end(ClientGone())

    def interrupt(self, error: GatewayError) -> None:
        self._end(error)

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
        due = now + min(limits.first_byte, limits.stall, LONGEST_TIMER_SECONDS)
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
        if not self._ended:  # giving up may have been the end
            self._arm()

    def _keep_alive_due(self, now: float) -> float:
        """A first keep-alive takes the answer's real status away. So the search for a worker is decided first, if it
        ends about when the keep-alive is due. A worker that has the request may refuse it too; one that has not within
        a moment is taken to be at work."""
        interval = self._limits.keepalive
        if self._delivery.head_sent and self._attempt is None:
            interval = min(interval, WAITING_KEEPALIVE_SECONDS)
        due = self._delivery.sent_at + interval
        if self._delivery.head_sent or not self._search.since or self._search.until > due + DECIDING_SECONDS:
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
        if self._search.elsewhere(attempt.replica) or overdue >= (STALL_LIMITS_WITHOUT_ALTERNATIVE - 1) * limit:
            attempt.give_up(f"no sign of life for {limit:g} s")
