"""A span for each relayed request, sent to an OpenTelemetry collector. The only module that imports OpenTelemetry, and
imported only where ``otlp_endpoint`` is set.

The span's parent is the client's ``traceparent``, and the worker gets a ``traceparent`` that makes its spans children
of this one. Spans leave in batches, from a thread: a collector that is slow or dead costs the spans and nothing else.
Sampling, limits and resource attributes are the SDK's, with its own environment variables (``OTEL_TRACES_SAMPLER``,
``OTEL_SERVICE_NAME`` and so on). Attribute names are those of the semantic conventions for HTTP servers and generative
AI, and ``hotspare.*``. No prompt and no answer is in any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from app.http_headers import find
from app.openai.errors import Header
from app.openai.surface import RelayRoute
from app.relay.relayed import Report, Try

logger = logging.getLogger(__name__)

TRACES_PATH: Final = "/v1/traces"
EXPORT_SECONDS: Final = 5.0
"""How long one batch may take, with all that the exporter tries again."""
FLUSH_SECONDS: Final = 2.0
"""How long the end of the process waits for the last spans."""
MAX_NAME_CHARS: Final = 200

_OPERATIONS: Final[Mapping[str, str]] = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}
"""The conventions' names of what a route does; other routes go by their own."""
_TRACEPARENT: Final = b"traceparent"


class Tracing:
    """An async context manager; leaving it sends what is left. ``count(outcome, spans)`` is called from a thread."""

    def __init__(self, endpoint: str, *, version: str, count: Callable[[str, int], None]) -> None:
        """``endpoint``: the collector's base URL, for OTLP over HTTP."""
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + TRACES_PATH, timeout=EXPORT_SECONDS)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "hotspare-gateway", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Watched(exporter, endpoint, count)))
        self._tracer = self._provider.get_tracer("hotspare", version)
        self._propagator = TraceContextTextMapPropagator()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The SDK waits for half a minute and takes no other deadline, so its waiting is done in a thread that may be
        left behind."""
        loop = asyncio.get_running_loop()
        flushed = asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(flushed.set)

        threading.Thread(target=flush, name="last-spans", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await flushed.wait()
        except TimeoutError:
            logger.warning("the last spans could not be sent within %g s", FLUSH_SECONDS)

    def begin(self, route: RelayRoute, headers: Sequence[Header]) -> RequestSpan:
        parent = find(headers, _TRACEPARENT)
        context = Context()
        if parent is not None:
            carrier = {"traceparent": parent.decode("latin-1")}
            state = find(headers, b"tracestate")
            if state is not None:
                carrier["tracestate"] = state.decode("latin-1")
            context = self._propagator.extract(carrier, context)
        operation = _OPERATIONS.get(route.name, route.name)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "hotspare",
            "http.request.method": "POST",
            "http.route": route.path,
            "url.path": route.path,
            "url.scheme": "http",
        }
        host = find(headers, b"host")
        if host is not None:
            name, _, port = host.decode("latin-1").rpartition(":")
            if name and port.isdigit():
                attributes |= {"server.address": name, "server.port": int(port)}
            else:
                attributes["server.address"] = host.decode("latin-1")
        started = time.time_ns()
        span = self._tracer.start_span(operation, context, SpanKind.SERVER, attributes, start_time=started)
        return RequestSpan(self._tracer, span, operation, started)


class RequestSpan:
    """The span of one request; :meth:`end` once, with how it went."""

    __slots__ = ("_operation", "_span", "_started", "_tracer")

    def __init__(self, tracer: Tracer, span: Span, operation: str, started_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._started = started_ns

    def headers(self, headers: Sequence[Header]) -> list[Header]:
        """The request's headers for the worker, whose spans become children of this one."""
        context = self._span.get_span_context()
        parent = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)
        return [*(item for item in headers if item[0] != _TRACEPARENT), (_TRACEPARENT, parent)]

    def end(self, *, model: str, status: int, first_seconds: float | None, request_id: bytes, report: Report) -> None:
        """``model`` is empty where no worker serves what the client named."""
        span = self._span
        if span.is_recording():
            span.set_attributes(self._attributes(model, status, first_seconds, request_id, report))
            if model:
                span.update_name(f"{self._operation} {model[:MAX_NAME_CHARS]}")
            if first_seconds is not None and report.streamed:
                span.add_event("gen_ai.first_token", timestamp=self._started + int(first_seconds * 1e9))
            if report.tries and report.attempts > 1:
                self._attempts(report)
            if status >= 500 or (report.error is not None and report.error.fault != "client"):
                span.set_status(Status(StatusCode.ERROR, None if report.error is None else report.error.message))
        span.end()

    def _attempts(self, report: Report) -> None:
        """A span for each attempt, below the request's; each is linked to the one before it."""
        skew = time.time_ns() - time.monotonic_ns()
        context = set_span_in_context(self._span)
        links: list[Link] = []
        tries = report.tries
        if report.attempts > len(tries):
            tries += (Try(report.worker, report.epoch, tries[-1].ended_at, time.monotonic(), ""),)
        for number, it in enumerate(tries, 1):
            attributes: dict[str, AttributeValue] = {
                "hotspare.attempt": number,
                "hotspare.worker": it.worker,
                "hotspare.epoch": it.epoch,
            }
            if it.ending:
                attributes["error.type"] = it.ending
            began, ended = int(it.began_at * 1e9) + skew, int(it.ended_at * 1e9) + skew
            attempt = self._tracer.start_span("attempt", context, SpanKind.CLIENT, attributes, links, start_time=began)
            attempt.end(ended)
            links = [Link(attempt.get_span_context(), {})]

    @staticmethod
    def _attributes(
        model: str, status: int, first_seconds: float | None, request_id: bytes, report: Report
    ) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue] = {
            "http.response.status_code": status,
            "http.response.body.size": report.bytes,
            "hotspare.request_id": request_id.decode("latin-1"),
        }
        if report.model:
            found["gen_ai.request.model"] = report.model[:MAX_NAME_CHARS]
        if model and report.worker and status < 400:
            found["gen_ai.response.model"] = model[:MAX_NAME_CHARS]
        if report.worker:
            found |= {"hotspare.worker": report.worker, "hotspare.epoch": report.epoch}
        if report.streamed:
            found["hotspare.events"] = report.events
            if first_seconds is not None:
                found["gen_ai.response.time_to_first_chunk"] = first_seconds
        if report.retries:
            found["hotspare.retries"] = report.retries
        if report.resumes:
            found["hotspare.resumes"] = report.resumes
        if report.error is not None:
            found["error.type"] = report.error.code
        elif report.disconnected:
            found["error.type"] = "client_disconnected"
        elif status >= 500:
            found["error.type"] = str(status)
        return found


class _Watched(SpanExporter):
    """The exporter, whose troubles are said once and counted. Used from the processor's thread."""

    def __init__(self, exporter: SpanExporter, endpoint: str, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._count = count
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:
            logger.exception("spans could not be encoded")
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        self._count("failed" if failed else "exported", len(spans))
        if failed and not self._failing:
            logger.warning("spans do not reach %s; they are dropped until they do", self._endpoint)
        elif self._failing and not failed:
            logger.info("spans reach %s again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True
