"""The relay: starts exchanges, and can end those that are left when the drain's time is over."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from app.each import each
from app.fleet.registry import WorkerRegistry
from app.fleet.routing import RoundRobinRouter
from app.fleet.worker_token import WorkerToken
from app.openai.errors import GatewayError
from app.relay.deadlines import RelayLimits
from app.relay.downstream import Downstream
from app.relay.exchange import Exchange, Shared
from app.relay.poison import RefusedBodies
from app.relay.recovery import RelayEvents, Uncounted, Ward
from app.relay.relayed import RelayRequest, Report
from app.relay.waiting import WaitQueue


class Relay:
    def __init__(
        self,
        *,
        registry: WorkerRegistry,
        router: RoundRobinRouter,
        queue: WaitQueue,
        limits: RelayLimits,
        token: WorkerToken | None = None,
        events: RelayEvents | None = None,
    ) -> None:
        """``events``: who counts what becomes of interrupted requests."""
        self.shared = Shared(
            registry=registry,
            router=router,
            queue=queue,
            limits=limits,
            token=token or WorkerToken(),
            ward=Ward(
                registry=registry,
                limits=limits,
                refused=RefusedBodies(secrets.token_bytes(32)),
                events=events or Uncounted(),
            ),
        )
        self._arrivals = 0
        self._over: GatewayError | None = None

    def start(
        self, request: RelayRequest, body: bytes, downstream: Downstream, report: Report, on_end: Callable[[], None]
    ) -> Exchange:
        """Answer one request; ``on_end`` is called once, when ``downstream`` was told everything, possibly at once.
        Errors become answers."""
        self._arrivals += 1
        exchange = Exchange(self.shared, request, body, downstream, report, order=self._arrivals, on_end=on_end)
        self.shared.exchanges.add(exchange)
        try:
            if self._over is not None:
                exchange.interrupt(self._over)
            else:
                exchange.start()
        except Exception:
            exchange.drop()
            raise
        return exchange

    @property
    def kept_bytes(self) -> int:
        """Bodies and notes of the requests that run."""
        return sum(exchange.kept_bytes for exchange in self.shared.exchanges)

    def interrupt_all(self, error: GatewayError) -> int:
        """End every exchange with this error, those too that have yet to begin; returns how many were running."""
        self._over = error
        running = list(self.shared.exchanges)
        each([partial(exchange.interrupt, error) for exchange in running])
        return len(running)
