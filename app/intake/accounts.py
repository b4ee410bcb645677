"""What is kept of a request that is over: metrics, its access line, and the end of its span."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.fleet.registry import WorkerRegistry
from app.openai.surface import RelayRoute
from app.relay.relayed import Report
from app.telemetry.access_log import AccessLog
from app.telemetry.lost_log import LostLog
from app.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:
    from app.telemetry.tracing import RequestSpan

CLIENT_CLOSED_REQUEST = 499
"""The status under which a request counts whose client left before its head was sent (nginx's convention)."""


class Accounts:
    def __init__(
        self, *, metrics: GatewayMetrics, registry: WorkerRegistry, access_log: AccessLog | None = None
    ) -> None:
        self.metrics = metrics
        self.access_log = access_log
        self._registry = registry
        self._lost_log = LostLog()

    def close(
        self,
        route: RelayRoute,
        request_id: bytes,
        report: Report,
        started: float,
        span: RequestSpan | None = None,
    ) -> None:
        """The request is over. ``started`` is ``time.monotonic()`` seconds."""
        seconds = time.monotonic() - started
        first = report.first_byte_at - started if report.first_byte_at else None
        status = report.status or CLIENT_CLOSED_REQUEST
        known = report.model if self._registry.knows(report.model) else ""
        self.metrics.request(
            route=route.name,
            model=known,
            status=status,
            seconds=seconds,
            first_token_seconds=first if report.streamed else None,
            inter_token_seconds=report.event_seconds,
        )
        error = report.error
        if report.waited:
            self.metrics.waited(report.waited)
        if error is not None and error.refusal:
            self.metrics.refused(error.refusal)
        if report.retries or report.disconnected or error is not None:
            self.metrics.trouble(
                route=route.name,
                retries=report.retries,
                disconnected=report.disconnected,
                error_code="" if error is None else error.code,
            )
            if report.lost:
                self._lost_log.lost(route.path, request_id, report)
        if self.access_log is not None:
            self.access_log.log(
                route,
                model=known,
                status=status,
                seconds=seconds,
                first_seconds=first,
                request_id=request_id,
                report=report,
            )
        if span is not None:
            span.end(model=known, status=status, first_seconds=first, request_id=request_id, report=report)
