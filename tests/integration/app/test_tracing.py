"""Spans, as a collector gets them: a real receiver of OTLP over HTTP decodes what the gateway sends."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.integration.app.conftest import one_shell, run_gateway
from tests.integration.app.fake_worker import MODEL, STREAM_HEAD, chunk, cuts, event, hangs, streams
from tests.integration.app.generating import Story
from workers.ports import PortReservation

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """Keeps every span that was sent to it. ``silent``: takes requests and never answers."""

    def __init__(self, *, silent: bool = False) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.asked = asyncio.Event()
        self._silent = silent
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.to_thread(join_exporters)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].split()[0])
                message = ExportTraceServiceRequest.FromString(await reader.readexactly(length))
                self.paths.add(head.split()[1])
                self.asked.set()
                if self._silent:
                    continue
                for group in message.resource_spans:
                    self.resources.append(attributes(group.resource))
                    self.spans += [span for scope in group.scope_spans for span in scope.spans]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()


def join_exporters() -> None:
    """No thread of the SDK outlives a test."""
    for thread in threading.enumerate():
        if thread.name.startswith(("OtelBatch", "last-spans")):
            thread.join(10)
            assert not thread.is_alive()


def attributes(holder: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}


async def test_a_span_tells_how_a_stream_went_and_the_worker_gets_it_as_parent(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    collector = Collector()
    began = time.time_ns()
    async with collector.running() as endpoint:
        async with run_gateway(worker, otlp_endpoint=endpoint + "/") as running:
            headers = {
                "traceparent": f"00-{TRACE}-{PARENT}-01",
                "tracestate": "vendor=1",
                "x-request-id": "r-1",
                "host": "api.test:8443",
            }
            body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "my secret"}]}
            answer = await running.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        assert collector.paths == {"/v1/traces"}
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    sent = worker.calls[0].headers
    assert sent["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert sent["tracestate"] == "vendor=1"
    assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert began <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    found = attributes(span)
    first = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first < 10
    assert found.pop("http.response.body.size") == len(answer.content)
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "hotspare",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "hotspare.epoch": 1,
        "hotspare.events": 3,
        "hotspare.request_id": "r-1",
        "hotspare.worker": "pod-0",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "server.address": "api.test",
        "server.port": 8443,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
    }
    (token,) = span.events
    assert token.name == "gen_ai.first_token"
    assert abs(token.time_unix_nano - span.start_time_unix_nano - first * 1e9) < 1e6
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert collector.resources[0]["service.name"] == "hotspare-gateway"
    assert "my secret" not in str(span)


async def test_a_request_without_a_parent_starts_a_trace(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    collector = Collector()
    async with collector.running() as endpoint, run_gateway(worker, otlp_endpoint=endpoint) as running:
        assert (await running.chat()).status_code == 200
        running.server.should_exit = True
        await running.task
        (span,) = collector.spans
        assert not span.parent_span_id
        given = worker.calls[0].headers["traceparent"]
        assert given[:-2] == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-"
        assert int(given[-2:], 16) & 1  # sampled; another bit says that the id is random
        assert not span.events


async def test_what_a_client_decided_not_to_sample_is_not_sent_but_passed_on(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    collector = Collector()
    async with collector.running() as endpoint, run_gateway(worker, otlp_endpoint=endpoint) as running:
        answer = await running.client.post(
            "/v1/completions", json={"model": MODEL}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
        )
        assert answer.status_code == 200
    assert collector.spans == []
    version, trace, parent, flags = worker.calls[0].headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "00")
    assert parent != PARENT


async def test_errors_have_a_type(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(cuts(STREAM_HEAD + chunk(event("a"))), hangs)
    collector = Collector()
    async with collector.running() as endpoint, run_gateway(worker, otlp_endpoint=endpoint) as running:
        assert (await running.chat(model="made-up")).status_code == 404
        async with running.stream() as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            worker.calls[0].go.set()
            assert b"worker_lost" in b"".join([piece async for piece in pieces])
        _, writer = await running.raw_chat(stream=False)
        await worker.call(1)
        writer.transport.abort()
        await running.until(lambda: running.gateway.admission.inflight == 0)
    by_type = {attributes(span)["error.type"]: span for span in collector.spans}
    assert by_type.keys() == {"model_not_found", "worker_lost", "client_disconnected"}
    unknown = by_type["model_not_found"]
    assert unknown.status.code == Status.STATUS_CODE_UNSET  # the client's fault is no error of a server
    assert unknown.name == "chat"  # and a name that a client made up is no name of a span
    assert attributes(unknown)["gen_ai.request.model"] == "made-up"
    assert "gen_ai.response.model" not in attributes(unknown)
    assert by_type["worker_lost"].status.code == Status.STATUS_CODE_ERROR
    assert attributes(by_type["client_disconnected"])["http.response.status_code"] == 499


@one_shell
async def test_a_dead_collector_costs_the_spans_only(workers: Any, caplog: pytest.LogCaptureFixture) -> None:
    (worker,) = await workers("pod-0")
    worker.will(*[streams(event("a")) for _ in range(20)])
    caplog.set_level(logging.INFO, "app")
    with PortReservation() as nobody:
        async with run_gateway(worker, otlp_endpoint=f"http://127.0.0.1:{nobody.port}") as running:
            for _ in range(20):
                assert (await running.chat(stream=True)).status_code == 200
            began = time.monotonic()
            running.server.request_drain()
            async with asyncio.timeout(10):
                await running.task
            assert time.monotonic() - began < 5
            assert running.server.exit_code == 0
        await asyncio.to_thread(join_exporters)
    assert "spans do not reach" in caplog.text


@one_shell
async def test_a_collector_that_hangs_is_not_waited_for(
    workers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.telemetry.tracing.FLUSH_SECONDS", 0.3)
    (worker,) = await workers("pod-0")
    collector = Collector(silent=True)
    async with collector.running() as endpoint, run_gateway(worker, otlp_endpoint=endpoint) as running:
        assert (await running.chat()).status_code == 200
        running.server.request_drain()
        async with asyncio.timeout(5):
            await running.task
        await running.until(collector.asked.is_set)  # by a thread that nobody waits for
        assert "could not be sent within 0.3 s" in caplog.text


async def test_without_an_endpoint_headers_pass_as_they_are(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        await running.client.post("/tokenize", json={}, headers={"traceparent": "as it is"})
    assert worker.calls[0].headers["traceparent"] == "as it is"


async def test_attempts_at_one_answer_are_spans_that_are_linked(workers: Any) -> None:
    one, two = await workers("pod-0", "pod-1")
    story = Story()
    one.will(story.told(cut=2))
    two.default = story.told()
    collector = Collector()
    async with collector.running() as endpoint, run_gateway(one, two, otlp_endpoint=endpoint) as running:
        assert (await running.chat(stream=True)).content == story.stream
    request = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    first, second = sorted(
        (span for span in collector.spans if span.name == "attempt"), key=lambda span: span.start_time_unix_nano
    )
    assert {span.trace_id for span in collector.spans} == {request.trace_id}
    assert first.parent_span_id == second.parent_span_id == request.span_id
    assert not first.links
    assert [link.span_id for link in second.links] == [first.span_id]
    assert (attributes(first)["hotspare.worker"], attributes(second)["hotspare.worker"]) == ("pod-0", "pod-1")
    assert attributes(first)["error.type"] == "connection closed"
    assert request.start_time_unix_nano <= first.start_time_unix_nano <= first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.end_time_unix_nano <= request.end_time_unix_nano + 10_000_000
    assert attributes(request)["hotspare.resumes"] == 1
