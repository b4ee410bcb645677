"""The gateway's HTTP client against peers that are no proper servers."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop

from app.address import Address, parse_address
from app.openai.errors import Header
from app.upstream.connection import Break, UpstreamConnection, UpstreamError
from app.upstream.pool import UpstreamPool
from tests.integration.app.conftest import until
from tests.integration.app.fake_worker import Behaviour, Call, FakeWorker

REQUEST = b"POST / HTTP/1.1\r\nhost: w\r\ncontent-length: 2\r\n\r\n{}"

on_both_loops = pytest.mark.parametrize(
    "loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"]
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.ended: asyncio.Future[Break | None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: list[Header]) -> None:
        self.status, self.headers = status, headers

    def read(self, data: bytes, done: bool) -> None:
        self.body += data
        if done:
            self.ended.set_result(None)

    def lost(self, error: UpstreamError) -> None:
        self.ended.set_result(error.kind)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def slamming_door() -> Iterator[Address]:
    """A listener that resets each connection as soon as it has accepted it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def slam() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            reset(accepted)

    thread = threading.Thread(target=slam)
    thread.start()
    try:
        yield Address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@on_both_loops
def test_a_connection_that_died_before_the_request_was_written(loop_factory: LoopFactory) -> None:
    breaks: list[str] = []

    async def main(listener: socket.socket) -> None:
        pool = UpstreamPool(
            Address(*listener.getsockname()), connect_timeout=2, on_break=lambda: breaks.append("break")
        )
        connection = await pool.open()
        reset(listener.accept()[0])
        await until(lambda: connection.closed)
        sink = Sink()
        with pytest.raises(UpstreamError) as caught:
            connection.send(REQUEST, sink)
        assert caught.value.kind is Break.UNSENT
        await asyncio.sleep(0.01)
        assert not sink.ended.done()
        pool.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main(listener))
    assert breaks == []  # nothing was asked of it


@on_both_loops
def test_however_late_a_connection_is_reset_somebody_is_told(loop_factory: LoopFactory) -> None:
    """The reset meets each moment between connect and answer: every request ends, and in no other way."""
    seen: set[Break | None] = set()

    async def once(pool: UpstreamPool, turns: int) -> Break | None:
        sink = Sink()
        try:
            connection = await pool.open()
            for _ in range(turns):
                await asyncio.sleep(0)
            connection.send(REQUEST, sink)
        except UpstreamError as error:
            return error.kind
        async with asyncio.timeout(5):
            return await sink.ended

    async def main(address: Address) -> None:
        pool = UpstreamPool(address, connect_timeout=2, on_break=lambda: None)
        for number in range(300):
            seen.add(await once(pool, number % 6))
        pool.close()

    with slamming_door() as address, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main(address))
    assert seen <= {Break.REFUSED, Break.UNSENT, Break.EOF, Break.RESET}


async def answer(*pieces: bytes) -> Sink:
    """What a sink hears of an answer that comes in these pieces, each in reads of its own."""
    received = UpstreamConnection.data_received
    got = 0

    def data_received(self: UpstreamConnection, data: bytes) -> None:
        nonlocal got
        got += len(data)
        received(self, data)

    async def behave(call: Call) -> None:
        for number, piece in enumerate(pieces, 1):
            await call.send(piece)
            sent = sum(map(len, pieces[:number]))
            await until(lambda sent=sent: got == sent or call.closed.is_set())  # type: ignore[misc]
        await call.closed.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpstreamConnection, "data_received", data_received)
        return await _answer(behave)


async def _answer(behave: Behaviour) -> Sink:
    async with FakeWorker() as worker:
        worker.will(behave)
        pool = UpstreamPool(parse_address(worker.address), connect_timeout=2, on_break=lambda: None)
        sink = Sink()
        (await pool.open()).send(REQUEST, sink)
        try:
            async with asyncio.timeout(5):
                await sink.ended
        finally:
            pool.close()
            await asyncio.wait_for(worker.calls[0].closed.wait(), 5)
    return sink


START = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"
FILLER = [b"x-%d: %b\r\n" % (number, b"y" * 8000) for number in range(12)]
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: " + b"z" * 8000 + b"\r\n\r\n"


INTERIMS = ("interim answers", "interim answers in one read", "interim answers in two reads", "small interim answers")


@pytest.mark.parametrize(
    "pieces",
    [
        [START, *FILLER, b"\r\n{}"],
        [b"".join([START, *FILLER, b"\r\n{}"])],
        [START + b"x: ", *[b"y" * 8000] * 12, b"\r\n\r\n{}"],
        [*[INTERIM] * 12, START + b"\r\n{}"],
        [b"".join([*[INTERIM] * 12, START + b"\r\n{}"])],
        [INTERIM * 6, INTERIM * 6 + START + b"\r\n{}"],
        [b"HTTP/1.1 100 \r\n\r\n" * 4000 + START + b"\r\n{}"],
        [b"HTTP/1.1 200 " + b"O" * 8000, *[b"K" * 8000] * 12, b"\r\ncontent-length: 2\r\n\r\n{}"],
    ],
    ids=["header by header", "in one read", "one long header", *INTERIMS, "reason"],
)
async def test_a_head_that_is_too_long(pieces: list[bytes]) -> None:
    sink = await answer(*pieces)
    assert (sink.ended.result(), sink.status) == (Break.JUNK, 0)


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([START, *FILLER[:7], b"\r\n{}"], b"{}"),
        ([START + FILLER[0], b"".join(FILLER[1:7]) + b"\r\n{}"], b"{}"),
        ([INTERIM, INTERIM, START + b"\r\n{}"], b"{}"),
        ([INTERIM * 2 + START.replace(b": 2", b": 900000") + b"\r\n" + b"b" * 900_000], b"b" * 900_000),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 900000\r\n\r\n" + b"b" * 900_000], b"b" * 900_000),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 900000\r\n", b"\r\n" + b"b" * 900_000], b"b" * 900_000),
    ],
    ids=[
        "header by header",
        "two reads",
        "interim answers",
        "interim answers and a body in one read",
        "a body in the same read",
        "a body in the read of its end",
    ],
)
async def test_a_long_head_or_a_long_body_is_fine(pieces: list[bytes], body: bytes) -> None:
    sink = await answer(*pieces)
    assert (sink.ended.result(), sink.status) == (None, 200)
    assert sink.body == body


@pytest.mark.parametrize("version", [b"0.9", b"2.0", b"3.0"])
@pytest.mark.parametrize("before", [b"", INTERIM], ids=["at once", "after an interim answer"])
async def test_another_version_of_http(before: bytes, version: bytes) -> None:
    sink = await answer(before + b"HTTP/%b 200 OK\r\ncontent-length: 2\r\n\r\n{}" % version)
    assert (sink.ended.result(), sink.status, sink.body) == (Break.JUNK, 0, b"")


async def test_trailers_are_no_headers() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-kept: 1\r\n\r\n"
    sink = await answer(head + b"2\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n")
    assert sink.body == b"{}"
    assert [name for name, _ in sink.headers] == [b"transfer-encoding", b"x-kept"]


CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
FILLERS = [b"y" * 8000] * 12


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKS + b"2\r\n{}\r\n", b"0\r\nx: ", *FILLERS, b"\r\n\r\n"],
        [CHUNKS + b"2\r\n{}\r\n", b"0\r\n", *FILLER, b"\r\n"],
        [CHUNKS + b"2\r\n{}\r\n", b"2;", *FILLERS, b"\r\n{}\r\n0\r\n\r\n"],
    ],
    ids=["one long trailer", "trailers", "a chunk's extension"],
)
async def test_what_is_no_body_is_bounded_after_the_head_too(pieces: list[bytes]) -> None:
    sink = await answer(*pieces)
    assert (sink.ended.result(), sink.status, sink.body) == (Break.JUNK, 200, b"{}")


async def test_framing_between_pieces_of_a_body_may_be_as_much_as_it_likes() -> None:
    pieces = [piece for _ in range(12) for piece in (b"2;" + b"y" * 8000, b"\r\n{}\r\n")]
    sink = await answer(CHUNKS, *pieces, b"0\r\n\r\n")
    assert (sink.ended.result(), sink.body) == (None, b"{}" * 12)
