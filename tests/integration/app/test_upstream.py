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

from app.address import Address
from app.openai.errors import Header
from app.upstream import Break, UpstreamError, UpstreamPool
from tests.integration.app.conftest import until

REQUEST = b"POST / HTTP/1.1\r\nhost: w\r\ncontent-length: 2\r\n\r\n{}"

on_both_loops = pytest.mark.parametrize(
    "loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"]
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended: asyncio.Future[Break | None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: list[Header]) -> None:
        self.status = status

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
