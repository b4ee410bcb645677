"""The one loop every relayed request runs through: select a worker, send, relay, and select again if it breaks.

An :class:`Exchange` is one request on that loop; the ``relay`` starts it. Independent of the transport: the client is a
``Downstream``, workers are ``upstream`` connections. Nothing here is a coroutine but the search for a worker, where
there is something to wait for. In the usual case, an idle connection to a routable worker, a request is sent, answered
and ended within the callbacks that brought its bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from app.fleet.registry import WorkerRegistry
from app.fleet.replica import Replica
from app.fleet.routing import RoundRobinRouter
from app.fleet.worker_token import WorkerToken
from app.openai.errors import GatewayError, internal, request_kills_worker
from app.relay.attempt import Answer, Attempt, Verdict
from app.relay.deadlines import RelayLimits, keep_alive_due, lost_patience, next_look
from app.relay.delivery import Delivery
from app.relay.downstream import ClientGone, Downstream
from app.relay.headers import upstream_headers
from app.relay.kept import Kept
from app.relay.recovery import Recovery, Ward
from app.relay.relayed import RelayRequest, Report
from app.relay.search import Search
from app.relay.waiting import WaitQueue
from app.upstream.connection import UpstreamConnection, UpstreamError

T = TypeVar("T")

logger = logging.getLogger(__name__)


_TROUBLE: Final = frozenset((Verdict.BROKEN, Verdict.SILENT, Verdict.UNUSABLE, Verdict.UNRESUMED))


class Shared:
    """What the exchanges of one relay share, and who keeps them while they run."""

    __slots__ = ("exchanges", "limits", "queue", "registry", "router", "searches", "token", "ward")

    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        router: RoundRobinRouter,
        queue: WaitQueue,
        limits: RelayLimits,
        token: WorkerToken,
        ward: Ward,
    ) -> None:
        self.registry = registry
        self.router = router
        self.queue = queue
        self.limits = limits
        self.token = token
        self.ward = ward
        self.exchanges: set[Exchange] = set()
        """Those that have not ended."""
        self.searches: set[asyncio.Task[None]] = set()

    def own(self, search: asyncio.Task[None]) -> None:
        """Keep a search alive until it is over."""
        self.searches.add(search)
        search.add_done_callback(self.searches.discard)


class Exchange:
    """One request on its way: a ``DownstreamObserver``."""

    __slots__ = (
        "_attempt",
        "_attempt_since",
        "_delivery",
        "_downstream",
        "_ended",
        "_kept",
        "_limits",
        "_lines",
        "_on_end",
        "_paused",
        "_pending",
        "_recovery",
        "_report",
        "_request",
        "_search",
        "_shared",
        "_timer",
    )

    def __init__(
        self,
        shared: Shared,
        request: RelayRequest,
        body: bytes,
        downstream: Downstream,
        report: Report,
        *,
        order: int,
        on_end: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._on_end = on_end
        self._limits = shared.limits
        self._request = request
        self._kept = Kept(body, shared.limits.keep, wanted=shared.limits.resumes and request.route.resumable)
        self._recovery: Recovery | None = None
        self._downstream = downstream
        self._report = report
        self._search = Search(
            shared.registry,
            shared.router,
            shared.queue,
            request.model,
            order=order,
            limit=shared.limits.wait_for_worker,
            home=shared.limits.home,
        )
        self._lines = b""
        self._attempt_since = 0.0
        self._attempt: Attempt | None = None
        self._pending: asyncio.Future[Any] | None = None
        self._ended = False
        self._paused = False
        self._delivery = Delivery(request, self._kept, downstream, report)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        request = self._request
        self._lines = upstream_headers(
            request.headers,
            length=len(self._kept.body),
            client_id=request.request_id,
            gateway_id=request.gateway_id,
            notes=self._kept.wanted,
        )
        limits = self._limits
        due = limits.first_look_streaming if request.streaming else limits.first_look
        self._timer = asyncio.get_running_loop().call_later(due, self._tick)
        self._downstream.observe(self)
        if self._ended:
            return
        refused = self._shared.ward.refused
        if refused.marks and refused.has(request.route.path, self._kept.body, time.monotonic()):
            self._report.repeated = True
            self._end(request_kills_worker(repeated=True))
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

    @property
    def kept_bytes(self) -> int:
        return self._kept.size_bytes

    def drop(self, outcome: ClientGone | GatewayError | None = None) -> None:
        """Let go of everything, and tell nobody."""
        self._ended = True
        self._shared.exchanges.discard(self)
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
        if self._recovery is not None:
            self._recovery.over(outcome)
        if self._kept.unresumable:
            self._shared.ward.events.unresumable(self._kept.unresumable.partition(":")[0])

    def _end(self, outcome: ClientGone | GatewayError | None) -> None:
        """The last thing that happens to an exchange; later ones change nothing."""
        if self._ended:
            return
        try:
            self.drop(outcome)
            if outcome is None:
                self._downstream.end()
            elif isinstance(outcome, GatewayError):
                outcome.__traceback__ = None  # its frames would keep all of this until the collector comes
                self._delivery.fail(outcome)
            else:
                self._report.disconnected = True
        except Exception:
            logger.exception("a request could not be ended as it should")
            self._downstream.abort()
        finally:
            self._on_end()

    # The search for a worker

    def _look(self, first: Replica | None = None) -> None:
        """Look for a worker in a task of its own, beginning with ``first``."""
        self._shared.own(asyncio.get_running_loop().create_task(self._until_sent(first)))

    async def _until_sent(self, replica: Replica | None) -> None:
        search = self._search
        try:
            while not self._ended:
                if self._recovery is not None and self._recovery.unsettled:
                    await self._recovery.settle(self._wait)
                replica = replica or search.find()
                if replica is None:
                    with search.waiting() as woken:
                        await self._wait(woken)
                    continue
                idle = replica.pool.take() if search.may_reuse() else None
                connection = idle or await self._connect(replica)
                if connection is not None:
                    self._try(replica, connection)
                    return
                search.unreached(replica)
                replica = None
        except GatewayError as error:
            self._end(error if self._recovery is None else self._recovery.ends_with(error))
        except Exception:
            self._failed("a request failed while it looked for a worker")

    def _concluded(self, verdict: Verdict) -> None:
        """What became of the attempt, said in the callback that brought its last bytes."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        try:
            self._go_on_after(attempt, verdict)
        except Exception:
            self._failed("a request failed at the end of an attempt")

    def _go_on_after(self, attempt: Attempt, verdict: Verdict) -> None:
        search, replica = self._search, attempt.replica
        if verdict is Verdict.FINISHED:
            search.took(replica)
            self._end(None)
            return
        if verdict is Verdict.FAILED:
            self._end(internal())
            return
        if verdict in _TROUBLE:
            error = self._recover().broke(attempt, verdict, self._attempt_since)
            if error is not None:
                self._end(error)
                return
        else:
            self._report.attempts -= 1  # nothing was started there
            if self._recovery is not None:
                self._recovery.unsent()
            search.tried(time.monotonic() - self._attempt_since)
            if verdict is Verdict.RESELECT:
                search.refused(replica)
            elif verdict is Verdict.UNTRUSTED:
                self._shared.registry.distrusted(replica)
                search.unreached(replica)
            elif verdict is Verdict.UNSENT:
                search.unreached(replica)
            else:
                search.stale()
        if self._request.streaming and self._delivery.head_sent:
            self._arm()  # from now on the client hears of us more often than while a worker has the request
        self._look()

    def _failed(self, what: str) -> None:
        """A bug of ours. Called where the exception is handled."""
        logger.exception(what)
        self._end(internal())

    def _recover(self) -> Recovery:
        if self._recovery is None:
            self._recovery = Recovery(
                self._shared.ward,
                self._request,
                self._kept,
                self._delivery,
                self._report,
                self._search,
            )
        return self._recovery

    async def _connect(self, replica: Replica) -> UpstreamConnection | None:
        """``None`` if it cannot be had."""
        opening = replica.pool.open()
        try:
            return await self._wait(opening)
        except UpstreamError:
            return None
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                replica.pool.give_back(opening.result())
            raise

    def _try(self, replica: Replica, connection: UpstreamConnection) -> None:
        request, recovery = self._request, self._recovery
        answer: Answer = self._delivery
        resumes = False
        lines, body = self._lines, self._kept.body
        if recovery is not None:
            answer, resumes = recovery.answer, recovery.resuming
            if resumes:
                lines, body = recovery.resume_request()
        if self._attempt_since and not resumes:
            self._kept.clear()  # the answer begins again, whatever an earlier attempt had written down of it
        self._attempt = attempt = Attempt(
            replica,
            connection,
            request.route,
            answer,
            streaming=request.streaming,
            max_held=self._limits.max_held_bytes,
            on_verdict=self._concluded,
            log=self._kept,
            resumes=resumes,
        )
        self._attempt_since = attempt.progress_at
        self._report.attempts += 1
        if recovery is not None:
            recovery.sent()
        self._report.worker, self._report.epoch = replica.key.worker, replica.key.epoch
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (request.target, replica.pool.host_header)
        attempt.start(b"".join((head, lines, self._shared.token.last_lines, body)), paused=self._paused)

    async def _wait(self, future: asyncio.Future[T]) -> T:
        """Wait for something that the exchange's end cuts short, by cancelling it. If it came in the same turn of the
        loop as the end, there was nothing to cancel any more, and it is not wanted either.

        Raises:
            asyncio.CancelledError: the exchange has ended; the search has nothing left to do.
        """
        self._pending = future
        try:
            result = await future
        finally:
            self._pending = None
        if self._ended:
            raise asyncio.CancelledError
        return result

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

    # Deadlines

    def _tick(self) -> None:
        self._timer = None
        try:
            self._look_at_deadlines()
        except Exception:
            self._failed("a request failed at one of its deadlines")

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        if self._request.streaming and not self._paused and now >= self._keep_alive_due(now):
            self._delivery.keep_alive()
        attempt = self._attempt
        if attempt is not None and not self._paused and now >= self._silent_until(attempt):
            limit = self._limits.silence(responded=attempt.responded)
            overdue = now - self._silent_until(attempt)
            if lost_patience(limit, overdue, elsewhere=self._search.elsewhere(attempt.replica)):
                attempt.give_up(f"no sign of life for {limit:g} s")
        if not self._ended:  # giving up may have been the end
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        attempt = self._attempt
        after = next_look(
            self._limits,
            now,
            keep_alive=self._keep_alive_due(now) if self._request.streaming else None,
            silent=self._silent_until(attempt) if attempt is not None and not self._paused else None,
        )
        self._timer = asyncio.get_running_loop().call_later(after, self._tick)

    def _keep_alive_due(self, now: float) -> float:
        delivery, search = self._delivery, self._search
        return keep_alive_due(
            self._limits,
            sent_at=delivery.sent_at,
            head_sent=delivery.head_sent,
            attempt_since=None if self._attempt is None else self._attempt_since,
            search_since=search.since,
            search_until=search.until,
            now=now,
        )

    def _silent_until(self, attempt: Attempt) -> float:
        """When this attempt has been silent for too long. Steps of the engine count as a sign of life."""
        last = max(attempt.progress_at, attempt.replica.steps_at)
        return last + self._limits.silence(responded=attempt.responded)
