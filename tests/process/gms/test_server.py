"""Clients that break things: the service lives, the others notice nothing, no descriptor stays behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from gms import fdpass, protocol
from gms.backends.host import HostBackend
from gms.client import GmsClient, GmsError, LeaseMode
from gms.factory import hasher
from gms.pages import receive_allocation
from gms.protocol import MAX_FDS, MAX_FIRST_FRAME, MAX_FRAME, MAX_MANIFEST
from gms.server import MAX_CLIENTS, Server
from gms.service import MemoryService
from gms.socket_path import SocketPath
from tests.process.gms import bench as benches
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import DEADLINE, MS, Process, until
from tests.process.gms.raw import HELLO, Raw, pidfds

pytestmark = pytest.mark.process


class Target:
    """The service that is annoyed, one for all that break their own connection only; on both devices."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.path = bench.path

    def connect(self, engine: str = "test", **more: Any) -> GmsClient:
        device = self.bench.device
        return GmsClient.connect(
            self.path, engine=engine, instance="test", device=device.name, device_id=device.id, **more
        )

    def raw(self) -> Raw:
        return Raw(self.path)

    def greeted(self) -> Raw:
        return Raw(self.path).greet(self.greeting())

    def hello(self, **changes: Any) -> bytes:
        return protocol.encode(self.greeting(**changes))

    def greeting(self, **changes: Any) -> protocol.Hello:
        device = self.bench.device
        return msgspec.structs.replace(HELLO, **{"device": device.name, "device_id": device.id, **changes})


@pytest.fixture(scope="module")
def shared(device: Device) -> Iterator[Target]:
    with Bench(device) as bench:
        yield Target(bench)
        bench.signal_service(signal.SIGTERM)
        assert bench.service.wait() == 0
        assert bench.service.rest() == ""  # no error is logged for what clients do


@pytest.fixture
def target(shared: Target) -> Iterator[Target]:
    """The test leaves the service with the descriptors it had, and another client with its lease and its pages."""
    service = shared.bench.service
    with shared.connect("witness") as client:
        lease = client.attach("weights/witness", LeaseMode.RW)
        lease.allocate("w", 1).close()
        client.status()  # it is done with the allocation before it answers the next request
        before = service.fds()
        yield shared
        until(lambda: len(service.fds()) == len(before), f"{service.fds()} are {before} again")
        lease.export("w").close()
        assert client.status().clients == 1
        lease.release(quiesced=True)


def counts(announced: int, sent: int) -> Any:
    return pytest.param(announced, sent, id=f"{announced} announced, {sent} sent")


@pytest.mark.parametrize(
    ("announced", "sent"), [counts(1, 0), counts(0, 0), counts(0, 1), counts(1, 2), counts(3, 2), counts(64, 63)]
)
def test_descriptor_counts_of_agreeting(target: Target, announced: int, sent: int) -> None:
    with target.raw() as connection, pidfds(sent) as fds:
        connection.send(target.hello(fds=announced), fds)
        answer = connection.last_word()
        assert (answer.code, f"announced {announced} pidfds and {sent} came" in answer.message) == ("bad_fds", True)


def test_as_many_descriptors_as_a_message_may_have(target: Target) -> None:
    with target.raw() as connection, pidfds(MAX_FDS) as fds:
        connection.send(target.hello(fds=MAX_FDS), fds)
        assert isinstance(connection.reply(), protocol.Welcome)


def test_more_descriptors_than_a_message_may_have(target: Target) -> None:
    """They do not fit beside the message, and the kernel says so: MSG_CTRUNC."""
    with target.raw() as connection, pidfds(MAX_FDS + 1) as fds:
        connection.send(target.hello(), fds)
        assert connection.last_word().code == "bad_fds"


def test_descriptors_that_trickle_in_are_counted(target: Target) -> None:
    with target.raw() as connection, pidfds(MAX_FDS // 2) as fds:
        for byte in target.hello()[:3]:
            connection.send(bytes([byte]), fds)
        assert connection.last_word().code == "bad_fds"


def test_a_descriptor_that_is_no_pidfd(target: Target) -> None:
    with target.raw() as connection, open("/dev/null") as null:
        connection.send(target.hello(), [null.fileno()])
        assert connection.last_word().code == "bad_fds"


@pytest.mark.parametrize("request_", [protocol.GetStatus(), protocol.Attach(pool="kv", mode=LeaseMode.RW)], ids=str)
def test_descriptors_beside_a_request_that_takes_none(target: Target, request_: protocol.Request) -> None:
    with target.greeted() as connection, pidfds(1) as fds:
        connection.send(protocol.encode(request_), fds)
        assert connection.last_word().code == "bad_fds"


def test_descriptors_that_are_announced_and_do_not_come(target: Target) -> None:
    with target.greeted() as connection:
        connection.send(protocol.encode(protocol.GetStatus(fds=1)))
        assert connection.last_word().code == "bad_fds"


@pytest.mark.parametrize(
    ("parts", "announced", "sent"),
    [([1], 1, 0), ([1], 0, 1), ([1], 2, 2), ([2], 1, 1), ([1, 1], 1, 1), ([64] * 64, 64, 64)],
    ids=str,
)
def test_descriptor_counts_of_a_hand_back(target: Target, parts: list[int], announced: int, sent: int) -> None:
    message = protocol.Adopt(
        pool="weights/x",
        generation=1,
        mode=LeaseMode.RO,
        parts=[protocol.Part("w", 0, count) for count in parts],
        fds=announced,
    )
    with target.greeted() as connection, pidfds(sent) as fds:
        connection.send(protocol.encode(message), fds)
        answer = connection.reply()
        assert isinstance(answer, protocol.Failure)
        assert answer.code in ("bad_fds", "mismatch")
        assert (answer.code == "mismatch") is (announced == sent)  # this service knows no such pages


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        (protocol.encode(protocol.GetStatus()), "bad_message", "must be a hello"),
        ({"version": 99}, "version_mismatch", f"speaks version 99, the service {protocol.VERSION};"),
        ({"version": 1}, "version_mismatch", f"speaks version 1, the service {protocol.VERSION};"),
        ({"device": "cuda:1", "device_id": "GPU-x"}, "wrong_device", "wants cuda:1 (GPU-x), this service has "),
        ((MAX_FIRST_FRAME + 1).to_bytes(4, "little"), "bad_message", f"{MAX_FIRST_FRAME}"),
        (b"\x01\x00\x00\x00\xc1", "bad_message", ""),
    ],
    ids=["no hello", "newer", "older", "other device", "too large", "no msgpack"],
)
def test_a_wrong_first_message(target: Target, first: bytes | dict[str, Any], code: str, words: str) -> None:
    with target.raw() as connection, pidfds(1) as fds:
        connection.send(first if isinstance(first, bytes) else target.hello(**first), fds)
        answer = connection.last_word()
        assert answer.code == code
        assert words in answer.message


@pytest.mark.parametrize("request_", [protocol.Hello, None], ids=["a second hello", "no message at all"])
def test_what_cannot_be_read_on_after(target: Target, request_: object) -> None:
    data = target.hello(fds=0) if request_ else b"\x01\x00\x00\x00\xc1"
    with target.greeted() as connection:
        connection.send(data)
        assert connection.last_word().code == "bad_message"


def test_a_frame_beyond_the_largest_is_not_waited_for(target: Target) -> None:
    for size in (MAX_FRAME + 1, (1 << 32) - 1):
        with target.greeted() as connection:
            connection.send(size.to_bytes(4, "little"))
            assert connection.last_word().code == "bad_message"


def test_a_field_out_of_its_bounds_is_refused_and_the_connection_goes_on(target: Target) -> None:
    with target.greeted() as connection:
        for request in [
            protocol.Attach(pool="weights/" + "x" * 129, mode=LeaseMode.RO),
            protocol.Attach(pool="kv", mode=LeaseMode.RW, epoch=-1),
            protocol.Attach(pool="kv", mode=LeaseMode.RW, timeout_seconds=float("nan")),
            protocol.Allocate(pool="kv", tag="\n", size_bytes=1),
            protocol.Commit(pool="weights/x", manifest=bytes(MAX_MANIFEST + 1)),
            protocol.GetEvents(timeout_seconds=61),
        ]:
            answer = connection.ask(request)
            assert isinstance(answer, protocol.Failure), request
            assert (answer.code, answer.retryable) == ("invalid", False), (request, answer)
        assert isinstance(connection.ask(protocol.GetStatus()), protocol.StatusReply)


def test_requests_sent_ahead_are_answered_in_order(target: Target) -> None:
    with target.greeted() as connection:
        connection.send(protocol.encode(protocol.GetStatus()) + protocol.encode(protocol.GetEvents(after=1 << 30)))
        assert [type(connection.reply()).__name__ for _ in range(2)] == ["StatusReply", "EventsReply"]


def test_a_flood_of_requests_sent_ahead_is_bounded(target: Target) -> None:
    """Who does not wait for replies is hung up on before the service has taken in more than a frame."""
    with target.greeted() as connection:
        connection.send(protocol.encode(protocol.Attach(pool="weights/never", mode=LeaseMode.RO)))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.send(bytes(2 * MAX_FRAME))


def test_a_request_in_single_bytes(target: Target) -> None:
    with target.greeted() as connection:
        for byte in protocol.encode(protocol.GetStatus()):
            connection.send(bytes([byte]))
        assert isinstance(connection.reply(), protocol.StatusReply)


def test_half_a_request_and_then_nothing(target: Target) -> None:
    with target.raw() as connection, pidfds(1) as fds:
        connection.send(target.hello()[:9], fds)
    with target.greeted() as connection:
        connection.send(protocol.encode(protocol.GetStatus())[:9])


def test_a_client_that_hangs_up_while_its_pages_are_filled(target: Target) -> None:
    with target.greeted() as connection:
        assert isinstance(connection.ask(protocol.Attach(pool="weights/a", mode=LeaseMode.RW)), protocol.Granted)
        connection.send(protocol.encode(protocol.Allocate(pool="weights/a", tag="w", size_bytes=1 << 28)))


def test_connections_are_bounded_the_reason_is_told_and_those_that_stand_are_served(
    target: Target,
) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(target.connect("c")) for _ in range(MAX_CLIENTS - 1)]
        for _ in range(20):
            with pytest.raises(GmsError, match=rf"{MAX_CLIENTS} clients are connected") as caught:
                target.connect("d")
            assert (caught.value.code, caught.value.retryable) == ("too_many", True)
        assert crowd[0].status().clients == crowd[-1].status().clients == MAX_CLIENTS
        crowd.pop().close()
        until(lambda: crowd[0].status().clients == MAX_CLIENTS - 1, "one has left")
        stack.enter_context(target.connect("e"))


def test_silent_connections_do_not_hold_up_those_that_speak(target: Target) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CLIENTS // 2):
            stack.enter_context(target.raw())
        with target.connect("b", timeout_seconds=5) as client:
            assert client.status(timeout_seconds=5).clients == 2


def free_descriptors(service: Process, count: int) -> None:
    """Leaves the service so many that it could still open."""
    used = {int(name) for name in os.listdir(f"/proc/{service.pid}/fd")}
    free = [number for number in range(len(used) + count + 1) if number not in used]
    _, hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (free[count], hard))


def test_a_service_that_has_no_descriptors_left() -> None:
    """Nothing dies of it: who is connected is served, who comes is told or waits, afterwards all is as before. On the
    host, since the fake driver keeps memory in files and so fails itself."""
    with Bench(benches.host()) as bench, bench.connect() as client:
        service = bench.service
        before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        lease = client.attach("weights/b", LeaseMode.RW)
        lease.allocate("w", 1).close()
        client.status()
        descriptors = service.fds()
        free_descriptors(service, 1)
        with busy("can hold no more"):  # MSG_CTRUNC: the pidfd found no room
            bench.connect("c")
        until(lambda: service.fds() == descriptors, "the one that was refused is gone")
        with busy("Too many open files"):  # enough for the pages, and none to send
            lease.allocate("x", 1)
        until(lambda: service.fds() == descriptors, "nothing is left of them")
        free_descriptors(service, 0)
        with busy("Too many open files", code="out_of_memory"):
            lease.allocate("x", 1)
        with busy("Too many open files"):
            lease.export("w")
        with Raw(bench.path) as waits:
            service.expect("cannot accept a connection (Too many open files)")
            assert client.status().clients == 1
            resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)
            waits.greet(Target(bench).greeting())
        lease.export("w").close()
        with bench.connect("d") as other:
            assert other.status().total_bytes == bench.device.unit
            until(lambda: other.status().clients == 2, "the one that waited is gone")
        until(lambda: service.fds() == descriptors, f"{service.fds()} are {descriptors} again")


@contextmanager
def busy(words: str, *, code: str = "busy") -> Iterator[None]:
    with pytest.raises(GmsError, match=words) as caught:
        yield
    assert (caught.value.code, caught.value.retryable) == (code, True)


# The other way round: a service that breaks things, and the client


class BrokenService:
    """Answers a hello as it should, and what comes after with `data` and `fds`."""

    def __init__(self, path: Path, data: bytes, fds: int, *, cut: bool = False) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._data, self._fds = data, fds
        self.answered = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(protocol.encode(protocol.Welcome(version=protocol.VERSION, device="cpu:0")))
            connection.recv(65536)
            with pidfds(self._fds) as fds:
                connection.sendmsg([self._data], fdpass.rights(fds))
            self.answered.set()
            connection.recv(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()
        self._listener.close()


PAGES = protocol.Pages(tag="w", size_bytes=8192, chunk_bytes=4096, created=True, fds=2)


@pytest.mark.parametrize(
    ("answer", "fds", "code"),
    [
        (PAGES, 1, "bad_fds"),
        (PAGES, 3, "bad_fds"),
        (PAGES, 0, "bad_fds"),
        (PAGES, MAX_FDS + 1, "bad_fds"),
        (protocol.Pages(tag="w", size_bytes=8192, chunk_bytes=4096, created=True, fds=3), 3, "bad_fds"),
        (protocol.Pages(tag="w", size_bytes=8192, chunk_bytes=4096, created=True, first=1, fds=1), 1, "bad_fds"),
        (protocol.Pages(tag="w", size_bytes=8192, chunk_bytes=0, created=True, fds=2), 2, "bad_message"),
        (protocol.Failure(code="x", message="x", fds=1), 1, "bad_fds"),
        (protocol.Done(), 0, "bad_message"),
        (protocol.Done(), 1, "bad_fds"),
        (b"\xff\xff\xff\xff", 1, "bad_message"),
        (b"\x01\x00\x00\x00\xc1", 0, "bad_message"),
        (b"\x09\x00\x00\x00half", 1, None),
    ],
    ids=str,
)
def test_what_a_client_does_not_take(tmp_path: Path, answer: protocol.Reply | bytes, fds: int, code: str) -> None:
    """It keeps no descriptor either: the harness counts them."""
    path = Path(os.path.relpath(tmp_path / "s"))
    data = answer if isinstance(answer, bytes) else protocol.encode(answer)
    with (
        BrokenService(path, data, fds) as service,
        GmsClient.connect(path, engine="a", instance="test") as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def close_once_answered() -> None:
            assert service.answered.wait(DEADLINE)
            client.close()

        if code is None:
            closing = pool.submit(close_once_answered)
        request = protocol.Allocate(pool="kv", tag="w", size_bytes=8192)
        with pytest.raises(GmsError) as caught:
            receive_allocation(client._connection, request)
        assert caught.value.code == (code or "closed")
        if code is None:
            closing.result()


# In this process: limits too long to wait for

GREETING = protocol.encode(HELLO)


Limited = Callable[..., MemoryService[Any]]


@pytest.fixture
async def limited(socket_path: Path) -> AsyncIterator[Limited]:
    with ExitStack() as stack:
        servers: list[Server] = []

        def start(**limits: float) -> MemoryService[Any]:
            service = MemoryService(HostBackend(), device="cpu:0", algorithm=hasher, fail=pytest.fail)
            stack.callback(service.close)
            servers.append(Server(service, **limits))
            servers[-1].start(stack.enter_context(SocketPath(str(socket_path))).listen())
            service.server = servers[-1]  # type: ignore[attr-defined]
            return service

        yield start
        for server in servers:
            await server.close()
            await server.close()


@pytest.mark.parametrize("said", [b"", b"\x05", GREETING[:-1]], ids=["nothing", "a byte", "all but a byte"])
async def test_a_client_that_says_too_little_is_hung_up_on(limited: Limited, socket_path: Path, said: bytes) -> None:
    limited(hello_seconds=20 * MS)

    def silent() -> bool:
        with Raw(socket_path) as connection, pidfds(1) as fds:
            if said:
                with suppress(BrokenPipeError):  # it was quicker
                    connection.send(said, fds)
            return connection.hung_up()

    assert await asyncio.to_thread(silent)


async def test_a_client_that_drips_its_hello_gets_no_more_time(limited: Limited, socket_path: Path) -> None:
    limited(hello_seconds=50 * MS)

    def dripping() -> int:
        with Raw(socket_path) as connection:
            for sent, byte in enumerate(GREETING):
                try:
                    connection.send(bytes([byte]))
                except BrokenPipeError:
                    return sent
                threading.Event().wait(2 * MS)
        return len(GREETING)

    assert len(GREETING) * 2 * MS > 3 * 50 * MS
    assert await asyncio.to_thread(dripping) < len(GREETING)


async def test_a_flood_of_silent_connections_passes(limited: Limited, socket_path: Path) -> None:
    """It takes every place for as long as a hello may take, and no longer; who is in is served all the while."""
    limited(hello_seconds=3000 * MS)  # in which all of them must have come

    def flood() -> None:
        with ExitStack() as stack:
            client = stack.enter_context(GmsClient.connect(socket_path, engine="in", instance="test"))
            silent = [stack.enter_context(Raw(socket_path)) for _ in range(MAX_CLIENTS + 10)]
            with pytest.raises(GmsError) as caught:
                GmsClient.connect(socket_path, engine="out", instance="test")
            assert (caught.value.code, caught.value.retryable) == ("too_many", True)
            assert client.status().clients == 1
            for connection in silent:
                while not connection.hung_up():  # those beyond the last place are told why
                    pass
            stack.enter_context(GmsClient.connect(socket_path, engine="late", instance="test"))
            assert client.status().clients == 2

    await asyncio.to_thread(flood)


async def test_a_client_that_does_not_read_its_reply_is_hung_up_on(limited: Limited, socket_path: Path) -> None:
    limited(send_seconds=50 * MS)

    def careless() -> None:
        with GmsClient.connect(socket_path, engine="w", instance="test") as writer:
            writer.attach("weights/a", LeaseMode.RW).commit(bytes(MAX_MANIFEST))
        with (
            Raw(socket_path).greet() as connection,
            GmsClient.connect(socket_path, engine="b", instance="test") as other,
        ):
            before = other.events().last
            connection.send(protocol.encode(protocol.Attach(pool="weights/a", mode=LeaseMode.RO)))
            until(lambda: "granted" in [event.kind for event in other.events(before).events], "it has a lease")
            until(lambda: not other.status().pools[0].leases, "it is gone, and the other is served all the while")
            assert len(connection.socket.recv(1 << 24, socket.MSG_WAITALL)) < MAX_MANIFEST

    await asyncio.to_thread(careless)


async def test_a_mistake_of_the_service_ends_one_connection_and_is_logged(
    limited: Limited, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(client: object, request: protocol.Release) -> protocol.Done:
        raise ValueError("no such thing")

    service = limited()
    monkeypatch.setattr(service, "release", broken)

    def two() -> None:
        with (
            GmsClient.connect(socket_path, engine="a", instance="test") as client,
            Raw(socket_path).greet() as connection,
        ):
            connection.send(protocol.encode(protocol.Release(pool="kv")))
            assert connection.last_word().code == "internal"
            while client.status().clients > 1:
                pass

    await asyncio.to_thread(two)
    assert "ValueError: no such thing" in caplog.text


async def somebody_waits(service: MemoryService[Any]) -> None:
    while not any(pool.waiting for pool in service.status().pools):  # noqa: ASYNC110 - another thread's doing
        await asyncio.sleep(0)


async def test_closing_ends_sessions_that_wait(limited: Limited, socket_path: Path) -> None:
    service = limited()

    def wait() -> str:
        with GmsClient.connect(socket_path, engine="b", instance="test") as client:
            try:
                client.attach("weights/a", LeaseMode.RO)
            except GmsError as error:
                return error.code
        return "granted"

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await somebody_waits(service)
    await service.server.close()  # type: ignore[attr-defined]
    assert await waiting == "service_gone"


async def test_a_client_closed_by_another_thread_ends_its_call(limited: Limited, socket_path: Path) -> None:
    service = limited()
    client = await asyncio.to_thread(GmsClient.connect, socket_path, engine="b", instance="test")
    waiting = asyncio.create_task(asyncio.to_thread(client.attach, "weights/a", LeaseMode.RO))
    await somebody_waits(service)
    await asyncio.to_thread(client.close)
    with pytest.raises(GmsError) as caught:
        await waiting
    assert caught.value.code == "closed"
    with pytest.raises(GmsError):
        client.status()
    client.close()
