"""Clients that break things: the service lives, the others notice nothing, no descriptor stays behind."""

from __future__ import annotations

import array
import asyncio
import os
import random
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gms import protocol
from gms.backends.host import HostBackend
from gms.client import GmsClient, GmsError, LeaseMode
from gms.server import MAX_CLIENTS, Server
from gms.service import MemoryService

pytestmark = pytest.mark.process

MS = 0.001
HELLO = protocol.Hello(
    version=protocol.VERSION, client="raw", engine="r", instance="test", device="cpu:0", device_id="cpu:0", fds=1
)


@contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        yield connection


def send(connection: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights)


def greet(connection: socket.socket) -> None:
    pidfd = os.pidfd_open(os.getpid())
    send(connection, protocol.encode(HELLO), [pidfd])
    os.close(pidfd)
    assert isinstance(reply(connection), protocol.Welcome)


def reply(connection: socket.socket) -> protocol.Reply:
    decoder = protocol.FrameDecoder()
    while (frame := decoder.next_frame()) is None:
        data = connection.recv(1)
        assert data, "the service hung up"
        decoder.feed(data)
    return protocol.decode_reply(frame)


def hung_up(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def last_word(connection: socket.socket) -> str:
    answer = reply(connection)
    assert isinstance(answer, protocol.Failure)
    assert hung_up(connection)
    return answer.code


@contextmanager
def pidfds(count: int) -> Iterator[list[int]]:
    fds = [os.pidfd_open(os.getpid()) for _ in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture
def flat(service: Any, client: GmsClient, eventually: Callable[..., None]) -> Iterator[None]:
    """The test leaves the service with the descriptors it had, and this client with its lease and pages."""
    lease = client.attach("kv", LeaseMode.RW, epoch=1)
    lease.allocate("pages", 4096).close()
    client.status()  # it is done with the allocation before it answers the next request
    before = service.fds()
    yield
    eventually(lambda: len(service.fds()) == len(before), f"{service.fds()} are {before} again")
    lease.allocate("pages", 4096).close()
    assert client.status().clients == 1


def sizes(announced: int, sent: int) -> Any:
    return pytest.param(announced, sent, id=f"{announced} announced, {sent} sent")


@pytest.mark.parametrize(("announced", "sent"), [sizes(1, 0), sizes(0, 0), sizes(0, 1), sizes(1, 2), sizes(3, 2)])
def test_wrong_descriptor_counts(flat: None, socket_path: Path, announced: int, sent: int) -> None:
    hello = protocol.Hello(version=1, client="raw", engine="r", instance="test", device="cpu:0", fds=announced)
    with raw(socket_path) as connection, pidfds(sent) as fds:
        send(connection, protocol.encode(hello), fds)
        assert last_word(connection) == "bad_fds"


def test_more_descriptors_than_a_message_may_have(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection, pidfds(17) as fds:
        send(connection, protocol.encode(HELLO), fds)
        assert last_word(connection) == "bad_fds"


def test_descriptors_that_trickle_in_are_counted(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection, pidfds(6) as fds:
        for byte in protocol.encode(HELLO)[:3]:
            send(connection, bytes([byte]), fds)
        assert last_word(connection) == "bad_fds"


def test_a_descriptor_that_is_no_pidfd(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection, open("/dev/null") as null:
        send(connection, protocol.encode(HELLO), [null.fileno()])
        assert last_word(connection) == "bad_fds"


def test_descriptors_and_counts_after_the_hello(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection, pidfds(1) as fds:
        greet(connection)
        send(connection, protocol.encode(protocol.GetStatus()), fds)
        assert last_word(connection) == "bad_fds"
    with raw(socket_path) as connection:
        greet(connection)
        send(connection, protocol.encode(protocol.GetStatus(fds=1)))
        assert last_word(connection) == "bad_fds"


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (protocol.GetStatus(), "bad_message"),
        (protocol.Hello(version=99, client="c", engine="e", instance="i", device="cpu:0"), "version_mismatch"),
        (protocol.Hello(version=1, client="c", engine="e", instance="i", device="cuda:0"), "wrong_device"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_wrong_first_message(flat: None, socket_path: Path, first: protocol.Request, code: str) -> None:
    with raw(socket_path) as connection:
        send(connection, protocol.encode(first))
        assert last_word(connection) == code


def test_a_large_first_frame_is_not_waited_for(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection:
        send(connection, (protocol.MAX_FIRST_FRAME + 1).to_bytes(4, "little"))
        assert last_word(connection) == "bad_message"


def test_an_oversize_frame_and_a_second_hello(flat: None, socket_path: Path) -> None:
    for data in [(protocol.MAX_FRAME + 1).to_bytes(4, "little"), b"\x01\x00\x00\x00\xc1", protocol.encode(HELLO)]:
        with raw(socket_path) as connection:
            greet(connection)
            send(connection, data)
            assert last_word(connection) in ("bad_message", "bad_fds")


def test_requests_sent_ahead_are_answered_in_order(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection:
        greet(connection)
        send(connection, protocol.encode(protocol.GetStatus()) * 3)
        assert [type(reply(connection)).__name__ for _ in range(3)] == ["StatusReply"] * 3


def test_a_request_in_single_bytes(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection:
        greet(connection)
        for byte in protocol.encode(protocol.GetStatus()):
            send(connection, bytes([byte]))
        assert isinstance(reply(connection), protocol.StatusReply)


@pytest.mark.parametrize("greeted", [False, True])
def test_random_bytes(flat: None, socket_path: Path, greeted: bool) -> None:
    dice = random.Random(20251130)
    for _ in range(100):
        with raw(socket_path) as connection:
            if greeted:
                greet(connection)
            body = dice.randbytes(dice.randrange(1, 300))
            header = len(body).to_bytes(4, "little") if dice.random() < 0.7 else b""
            try:
                send(connection, header + body)
            except BrokenPipeError:
                continue
            connection.shutdown(socket.SHUT_WR)
            assert hung_up(connection)


def test_half_a_request_and_then_nothing(flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection, pidfds(1) as fds:
        send(connection, protocol.encode(HELLO)[:9], fds)
    with raw(socket_path) as connection:
        greet(connection)
        send(connection, protocol.encode(protocol.GetStatus())[:9])


def test_a_client_that_hangs_up_while_its_pages_are_filled(client: GmsClient, flat: None, socket_path: Path) -> None:
    with raw(socket_path) as connection:
        greet(connection)
        send(connection, protocol.encode(protocol.Attach(pool="weights/a", mode=LeaseMode.RW)))
        assert isinstance(reply(connection), protocol.Granted)
        send(connection, protocol.encode(protocol.Allocate(pool="weights/a", tag="w", size_bytes=1 << 30)))


def test_connections_are_bounded_and_the_reason_is_told(
    client: GmsClient, service: Any, socket_path: Path, eventually: Callable[..., None]
) -> None:
    crowd = []
    try:
        for _ in range(MAX_CLIENTS - 1):
            crowd.append(GmsClient.connect(socket_path, engine="c", instance="test"))
        with pytest.raises(GmsError, match=r"128 clients are connected") as caught:
            GmsClient.connect(socket_path, engine="d", instance="test")
        assert caught.value.code == "too_many"
    finally:
        for one in crowd:
            one.close()
    eventually(lambda: client.status().clients == 1, "all are gone")


def test_the_socket_is_private(service: Any, socket_path: Path) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600


def test_a_user_who_is_not_ours_is_refused(flat: None, socket_path: Path, spawn: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    stranger = spawn(
        [
            "-c",
            "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setresuid(12345, 12345, 12345)\n"
            "try: s.connect(sys.argv[1])\nexcept PermissionError: print('kept out', flush=True)",
            str(socket_path),
        ]
    )
    assert stranger.line() == "kept out"


# In this process: limits too long to wait for


Limited = Callable[..., Server]


@pytest.fixture
async def limited(socket_path: Path) -> AsyncIterator[Limited]:
    servers: list[Server] = []

    def start(**limits: float) -> Server:
        servers.append(Server(MemoryService(HostBackend(), device="cpu:0"), str(socket_path), **limits))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        await server.close()
        await server.close()


async def test_a_silent_client_is_hung_up_on(limited: Limited, socket_path: Path) -> None:
    limited(hello_seconds=20 * MS)

    def silent() -> bool:
        with raw(socket_path) as connection:
            return hung_up(connection)

    assert await asyncio.to_thread(silent)


async def test_a_client_that_does_not_read_its_reply_is_hung_up_on(limited: Limited, socket_path: Path) -> None:
    limited(send_seconds=50 * MS)

    def careless() -> None:
        with GmsClient.connect(socket_path, engine="w", instance="test") as writer:
            writer.attach("weights/a", LeaseMode.RW).commit(bytes(protocol.MAX_MANIFEST))
        with raw(socket_path) as connection:
            greet(connection)
            send(connection, protocol.encode(protocol.Attach(pool="weights/a", mode=LeaseMode.RO)))
            with GmsClient.connect(socket_path, engine="b", instance="test") as other:
                while other.status().pools[0].leases:
                    pass
            assert len(connection.recv(1 << 24, socket.MSG_WAITALL)) < protocol.MAX_MANIFEST

    await asyncio.to_thread(careless)


async def somebody_waits(server: Server) -> None:
    while not any(pool.waiting for pool in server.status().pools):  # noqa: ASYNC110 - another thread's doing
        await asyncio.sleep(0)


async def test_closing_ends_sessions_that_wait(limited: Limited, socket_path: Path) -> None:
    server = limited()

    def wait() -> str:
        with GmsClient.connect(socket_path, engine="b", instance="test") as client:
            try:
                client.attach("weights/a", LeaseMode.RO)
            except GmsError as error:
                return error.code
        return "granted"

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await somebody_waits(server)
    await server.close()
    assert await waiting == "service_gone"


async def test_a_client_closed_by_another_thread_ends_its_call(limited: Limited, socket_path: Path) -> None:
    server = limited()
    client = await asyncio.to_thread(GmsClient.connect, socket_path, engine="b", instance="test")
    waiting = asyncio.create_task(asyncio.to_thread(client.attach, "weights/a", LeaseMode.RO))
    await somebody_waits(server)
    await asyncio.to_thread(client.close)
    with pytest.raises(GmsError) as caught:
        await waiting
    assert caught.value.code == "closed"
    with pytest.raises(GmsError):
        client.status()
    client.close()
