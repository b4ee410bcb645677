"""What clients and scrapers may hold of the service, and for how long."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gms.channel import FREE_BYTES, Channel, Unread
from gms.client import GmsClient, LeaseMode
from gms.protocol import ErrorCode, GmsError
from tests.process.gms.processes import MS, Process, until
from workers.ports import PortReservation

BIG = (1 << 20).to_bytes(4, "little")


async def received(channel: Channel) -> GmsError:
    with pytest.raises(GmsError) as caught:
        await channel.receive()
    return caught.value


async def test_a_frame_that_does_not_end_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, lambda: None, frame_seconds=30 * MS)
    try:
        theirs.send(b"\x05\x00\x00\x00abc")
        error = await received(channel)
        assert (error.code, "took more than 0.03 s to arrive" in str(error)) == (ErrorCode.BAD_MESSAGE, True)
    finally:
        channel.close()
        theirs.close()


async def test_a_frame_that_waits_for_the_service_is_not_given_up() -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    channel = Channel(ours, lost.set, frame_seconds=10 * MS)
    try:
        theirs.send(b"\x03\x00\x00\x00abc")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lost.wait(), 60 * MS)
        assert (await channel.receive())[0] == b"abc"
    finally:
        channel.close()
        theirs.close()


async def test_all_together_hold_no_more_than_their_limit() -> None:
    unread = Unread(limit=3 * FREE_BYTES)
    with ExitStack() as stack:
        channels, peers = [], []
        for _ in range(3):
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            theirs.settimeout(10)
            channels.append(Channel(ours, lambda: None, unread=unread))
            stack.callback(channels[-1].close)
            channels[-1].accept_full_frames()
            peers.append(theirs)
        readers = [asyncio.create_task(channel.receive()) for channel in channels[:2]]
        for reader in readers:
            stack.callback(reader.cancel)
        await asyncio.sleep(0)
        for peer in peers[:2]:
            await asyncio.to_thread(peer.sendall, BIG + bytes(FREE_BYTES * 5 // 4))
        waiting = asyncio.create_task(received(channels[2]))
        await asyncio.sleep(0)
        await asyncio.to_thread(peers[2].sendall, BIG + bytes(FREE_BYTES * 5 // 4))
        error = await waiting
        assert (error.code, error.retryable) == (ErrorCode.BUSY, True)
        assert unread.total <= unread.limit + FREE_BYTES * 5 // 4
    assert unread.total == 0


async def test_what_a_closed_channel_held_is_gone_at_once() -> None:
    ours, theirs = socket.socketpair()
    unread = Unread()
    channel = Channel(ours, lambda: None, unread=unread)
    channel.accept_full_frames()
    theirs.settimeout(10)
    waiting = asyncio.create_task(channel.receive())
    await asyncio.to_thread(theirs.sendall, BIG + bytes(1 << 19))
    async with asyncio.timeout(10):
        while unread.total < 1 << 19:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0)
    waiting.cancel()
    channel.close()
    theirs.close()
    assert (unread.total, channel._decoder.buffered) == (0, 0)


async def test_a_large_frame_sent_ahead_of_a_reply_is_refused() -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    channel = Channel(ours, lost.set)
    channel.accept_full_frames()
    theirs.settimeout(10)
    try:
        theirs.send(b"\x01\x00\x00\x00a")
        assert (await channel.receive())[0] == b"a"  # it is being answered from here on
        await asyncio.to_thread(theirs.sendall, BIG + bytes(2 * FREE_BYTES))
        await asyncio.wait_for(lost.wait(), 10)
        assert "sent ahead" in str(await received(channel))
    finally:
        channel.close()
        theirs.close()


def test_scrapers_that_say_nothing_take_nothing_from_clients(
    serve: Callable[..., Process], socket_path: Path, free_port: int
) -> None:
    service = serve("--metrics-port", str(free_port))
    before = len(service.fds())
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", free_port), timeout=10))
        with GmsClient.connect(socket_path, engine="a", instance="test") as client:
            assert client.status().total_bytes == 0
        until(lambda: len(service.fds()) <= before + 10, "most of them are turned away")
        assert len(os.listdir(f"/proc/{service.pid}/task")) <= 16

        def scraped() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as answer:
                    return b"hotspare_gms_clients" in answer.read()
            except OSError:
                return False

        until(scraped, "those that are silent are given up, and scrapes are answered again")


@pytest.fixture
def free_port() -> Iterator[int]:
    with PortReservation() as free:
        yield free.port


def test_a_removed_lock_file_does_not_let_a_second_service_in(serve: Any, spawn: Any, socket_path: Path) -> None:
    serve()
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        client.attach("kv", LeaseMode.RW, epoch=9).release(quiesced=True)
    Path(f"{socket_path}.lock").unlink()
    folder = Path(f"{socket_path}.state")
    before = sorted(path.name for path in folder.iterdir())
    second = spawn(["-m", "gms", "--socket", str(socket_path)], stream="stderr")
    assert second.wait() == 2
    assert sorted(path.name for path in folder.iterdir()) == before != []
    assert "Another memory service is alive" in second.rest()
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        assert client.status().clients == 1
        with pytest.raises(GmsError, match="has seen epoch 9"):
            client.attach("kv", LeaseMode.RW, epoch=5)
