"""The protocol class under any cutting of valid exchanges, and under bytes that are none.

The transport is a fake that hands over exactly the pieces it is told to; worker, relay and application are real.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httptools
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.clients.protocol import ClientProtocol
from tests.integration.app.conftest import Running, run_gateway
from tests.integration.app.fake_worker import MODEL, FakeWorker

Answer = tuple[int, dict[bytes, bytes], bytes]
FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
"""Examples are the same in each run: a rare one must not fail somebody else's change."""
VARYING = (b"date", b"openai-processing-ms", b"transfer-encoding", b"content-length")


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol | None = None
        self.written = bytearray()
        self.closed = asyncio.Event()
        self.reading = True
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.written += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    def abort(self) -> None:
        self.close()

    def _lose(self) -> None:
        assert self.protocol is not None
        self.protocol.connection_lost(None)
        self.closed.set()

    def write_eof(self) -> None:
        """As if the client closed when it has read our end."""
        self.close()

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol


class Answers:
    """Reads what was written, in whatever pieces."""

    def __init__(self) -> None:
        self.all: list[Answer] = []
        self._parser = httptools.HttpResponseParser(self)

    def read(self, data: bytes) -> list[Answer]:
        self._parser.feed_data(data)
        return [answer for answer in self.all if answer[0] != 100]

    def on_message_begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name not in VARYING:
            self._headers[name] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.all.append((self._parser.get_status_code(), self._headers, self._body))


class Bench:
    def __init__(self, runner: asyncio.Runner, running: Running, worker: FakeWorker) -> None:
        self.runner = runner
        self.running = running
        self.worker = worker

    def exchange(self, pieces: Sequence[bytes], *, turns: int = 1) -> tuple[list[Answer], list[tuple[str, bytes]]]:
        """What these pieces are answered with, and what reached the worker; the client leaves when all is said."""
        return self.runner.run(self._exchange(pieces, turns))

    async def _exchange(self, pieces: Sequence[bytes], turns: int) -> tuple[list[Answer], list[tuple[str, bytes]]]:
        before = len(self.worker.calls)
        state = self.running.server.server_state
        protocol = ClientProtocol(self.running.server.config, state, {}, asyncio.get_running_loop())
        transport = FakeTransport()
        transport.protocol = protocol
        protocol.connection_made(transport)
        async with asyncio.timeout(10):
            for piece in pieces:
                while not transport.reading and not transport.is_closing():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                if transport.is_closing():
                    break
                protocol.data_received(piece)
                for _ in range(turns):
                    await asyncio.sleep(0)
            while protocol.cycle is not None and not protocol.cycle.response_complete and not transport.is_closing():
                if protocol.cycle.more_body and transport.reading and not (protocol.pipeline or protocol._ahead):
                    break  # it waits for more, and for nobody before it
                await asyncio.sleep(0)
            if not transport.is_closing():
                protocol.eof_received()
                transport.close()
            await transport.closed.wait()
            while self.running.gateway.admission.inflight:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert protocol not in state.connections
        calls = [(call.target, call.body) for call in self.worker.calls[before:]]
        return Answers().read(bytes(transport.written)), calls

    def is_well(self) -> bool:
        async def look() -> bool:
            answer = await self.running.client.get("/live")
            return answer.status_code == 200 and self.running.gateway.admission.inflight == 0

        return self.runner.run(look())


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        worker: FakeWorker = runner.run(stack.enter_async_context(FakeWorker("pod-0")))
        running: Running = runner.run(stack.enter_async_context(run_gateway(worker, **options)))
        try:
            yield Bench(runner, running, worker)
        finally:
            runner.run(stack.aclose())


BODY = json.dumps({"model": MODEL, "padding": "x" * 40}).encode()
STREAM = json.dumps({"model": MODEL, "stream": True}).encode()
PACKED = gzip.compress(BODY, mtime=0)


def post(number: int, body: bytes, *lines: bytes, framed: bytes | None = None) -> bytes:
    length = b"content-length: %d\r\n" % len(body) if framed is None else b"transfer-encoding: chunked\r\n"
    head = b"POST /v1/completions?n=%d HTTP/1.1\r\nhost: g\r\nx-request-id: id-%d\r\n" % (number, number)
    return b"".join((head, *lines, length, b"\r\n", body if framed is None else framed))


def get(number: int, target: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    head = b"%b %b HTTP/1.1\r\nhost: g\r\nx-request-id: id-%d\r\n" % (method, target, number)
    return b"".join((head, *lines, b"\r\n"))


CHUNKED = b'5;a=b;c="d"\r\n%b\r\n%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n' % (BODY[:5], len(BODY) - 5, BODY[5:])
VALID = b"".join(
    (
        get(1, b"/live"),
        post(2, BODY),
        post(3, b"", framed=CHUNKED),
        b"\r\n",
        get(4, b"/v1/completions", method=b"OPTIONS"),
        post(5, PACKED, b"content-encoding: gzip\r\n"),
        post(6, b"no json"),
        get(7, b"/nowhere", b"connection: upgrade\r\n", b"upgrade: h2c\r\n"),
        post(8, STREAM),
        post(9, BODY, b"expect: 100-continue\r\n"),
        post(10, BODY, b"connection: close\r\n"),
    )
)
STATUSES = [200, 200, 200, 204, 200, 400, 404, 200, 200, 200]


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def test_any_cutting_of_a_valid_exchange(shell: str) -> None:
    with bench() as here:
        expected = here.exchange([VALID])
        answers, calls = expected
        assert [status for status, _, _ in answers] == STATUSES
        assert [headers[b"x-request-id"] for _, headers, _ in answers] == [b"id-%d" % n for n in range(1, 11)]
        assert [body for _, body in calls] == [BODY, BODY, BODY, STREAM, BODY, BODY]
        assert here.exchange([VALID[i : i + 1] for i in range(len(VALID))]) == expected  # byte by byte

        @FEW
        @given(st.lists(st.integers(1, len(VALID) - 1), max_size=60), st.integers(0, 3))
        def check(places: list[int], turns: int) -> None:
            assert here.exchange(cut(VALID, places), turns=turns) == expected

        check()
        assert here.is_well()


MEANT = {100, 200, 204, 400, 404, 405, 408, 413, 415, 417, 431, 501, 505}
"""Of the server errors, those that say that something is not spoken here."""


def mutated(changes: Sequence[tuple[int, int, bytes]]) -> bytes:
    """The valid exchange, with some bytes replaced by others: place, how many, by what."""
    data = bytearray(VALID)
    for place, size, by in changes:
        at = place % (len(data) + 1)
        data[at : at + size] = by
    return bytes(data)


PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [
            b"\r\n",
            b"\n",
            b"\r",
            b"\x00",
            b" ",
            b"\t",
            b":",
            b"0\r\n\r\n",
            b"HTTP/1.0",
            b"Content-Length: 3\r\n",
            b"\xff",
        ]
    ),
    st.sampled_from([b"Transfer-Encoding: chunked\r\n", b"Expect: x\r\n", b"Connection: close\r\n", b"Upgrade: x\r\n"]),
)


def test_bytes_that_are_no_exchange(shell: str) -> None:
    """Answered in the envelope, or not at all; nothing breaks, nothing is left behind."""
    with bench(head_timeout_seconds=5, body_timeout_seconds=5) as here:

        def harmless(data: bytes, places: Sequence[int]) -> None:
            answers, calls = here.exchange(cut(data, places) if len(data) > 1 else [data])
            for status, headers, body in answers:
                assert status in MEANT
                assert status < 300 or list(json.loads(body)) == ["error"] or not body
                assert status == 100 or headers[b"x-request-id"]
            assert len(calls) <= sum(status == 200 for status, _, _ in answers) + 1

        @FEW
        @given(st.binary(min_size=1, max_size=300), st.lists(st.integers(1, 299), max_size=5))
        @example(b"\x16\x03\x01\x02\x00\x01\x00", [])
        @example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [3])
        def noise(data: bytes, places: list[int]) -> None:
            harmless(data, places)

        @FEW
        @given(
            st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 8), PIECES), min_size=1, max_size=4),
            st.lists(st.integers(1, len(VALID)), max_size=10),
        )
        def damage(changes: list[tuple[int, int, bytes]], places: list[int]) -> None:
            harmless(mutated(changes), places)

        noise()
        damage()
        assert here.is_well()


@pytest.mark.parametrize("place", [20, len(VALID) // 2, len(VALID) - 3])
def test_a_client_that_leaves_in_the_middle(shell: str, place: int) -> None:
    with bench() as here:
        answers, _ = here.exchange([VALID[:place]])
        assert len(answers) <= len(STATUSES)
        assert here.is_well()
