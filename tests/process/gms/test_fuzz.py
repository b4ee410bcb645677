"""Ten thousand bad inputs to a live service: it answers with an error or closes that connection, and that is all.

Each example of Hypothesis is a batch of inputs; what is counted is what was sent. They are others in every run. One
that fails is printed, with what reproduces it, and not made smaller: the time of a run is bounded.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gms import protocol
from gms.client import GmsClient, LeaseMode
from tests.process.gms.processes import Process, until
from tests.process.gms.raw import HELLO, Raw, pidfds

pytestmark = pytest.mark.process

BATCH = 20
SLOWEST_STATUS_SECONDS = 6.0
"""Generous, for a test machine that does other things; what it must not be is the time that a batch takes."""
MOST_GROWTH_BYTES = 8 << 20
LIMIT = 16 << 20

Sent = list[int]
"""How many cases, in its one element."""


def fuzzed(examples: int) -> settings:
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,  # in CI it would be True by itself
        phases=[Phase.generate],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


class Witness:
    """Another client, in a thread: holds leases, and asks for the status all the while."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as stack:
            self._client = stack.enter_context(GmsClient.connect(path, engine="witness", instance="test"))
            self._lease = self._client.attach("weights/witness", LeaseMode.RW)
            self._lease.allocate("w", 4096).close()
            self._lease.commit(b"manifest")
            epoch = max((pool.epoch for pool in self._client.status().pools), default=0) + 1
            self._index = self._client.attach("kv_index", LeaseMode.RW, epoch=epoch)
            self._index.allocate("index", 4096).close()
            self._stack = stack.pop_all()
        self.slowest = 0.0
        self._failure: BaseException | None = None
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while not self._enough.wait(0.005):
                started = time.monotonic()
                self._client.status()
                self.slowest = max(self.slowest, time.monotonic() - started)
        except BaseException as error:
            self._failure = error

    def close(self) -> None:
        """Fails if it noticed anything."""
        self._enough.set()
        self._thread.join()
        with self._stack:
            assert self._failure is None, self._failure
            assert self.slowest < SLOWEST_STATUS_SECONDS
            held = {pool.name: pool for pool in self._client.status().pools}
            assert held["weights/witness"].generation == self._lease.generation
            assert [lease.engine for lease in held["kv_index"].leases] == ["witness"]
            self._lease.export("w").close()
            assert self._lease.verify() == 4096
            with self._index.allocate("index", 4096) as pages:
                assert not pages.created
            self._lease.release()
            self._index.release(quiesced=True)


def resident(pid: int) -> int:
    """Bytes of its own; the pages that it keeps for others are counted where they are mapped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def own_descriptors(service: Process, path: Path) -> int:
    """Those of the service with one client, without pages, which are as many as the status says."""
    with GmsClient.connect(path, engine="count", instance="test") as client:
        until(lambda: client.status().clients == 1, "nobody else is left")
        allocations = [info for pool in client.status().pools for info in pool.allocations]
        pages = sum(-(-info.size_bytes // info.chunk_bytes) for info in allocations)
        until(lambda: count(service, pages=True) == pages, f"{service.fds()}: {pages} chunks")
        return count(service, pages=False)


def count(service: Process, *, pages: bool) -> int:
    return sum(("memfd:gms" in target) is pages for target in service.fds())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Path]]:
    path = tmp_path_factory.mktemp("fuzz") / "s"
    flags = ["--socket", str(path), "--memory-limit", str(LIMIT), "--chunk-size", "8192"]
    process = Process(["-m", "gms", *flags], {"HOTSPARE_GMS_LOG_LEVEL": "error"}, "stderr")
    try:
        GmsClient.connect(path, engine="start", instance="test").close()
        yield process, path
        process.process.terminate()
        assert process.wait() == 0
        assert process.rest() == ""  # nothing that a client does is an error of the service
    finally:
        process.close()


@pytest.fixture
def path(service: tuple[Process, Path]) -> Iterator[Path]:
    """Around a test: nobody else notices, nothing is left, nothing has grown."""
    process, path = service
    tidy(path)
    descriptors, memory = own_descriptors(process, path), resident(process.pid)
    witness = Witness(path)
    try:
        yield path
    finally:
        witness.close()
    tidy(path)
    assert own_descriptors(process, path) == descriptors, process.fds()
    assert resident(process.pid) - memory < MOST_GROWTH_BYTES


def tidy(path: Path) -> None:
    """This process has been many clients, and it lives: it lets go of what any of them may have had."""
    with GmsClient.connect(path, engine="tidy", instance="test") as client:
        for pool in client.status().pools:
            lease = client.attach(pool.name, LeaseMode.RW, epoch=pool.epoch + 1, timeout_seconds=10)
            lease.release(quiesced=True)


# Bytes

FRAMES = st.binary(min_size=1, max_size=200).map(lambda body: len(body).to_bytes(4, "little") + body)
LIES = st.tuples(st.integers(0, (1 << 32) - 1), st.binary(max_size=64)).map(lambda x: x[0].to_bytes(4, "little") + x[1])
TRUNCATED = st.tuples(st.sampled_from([protocol.GetStatus(), HELLO]), st.integers(1, 60)).map(
    lambda x: protocol.encode(x[0])[: x[1]]
)
HOSTILE = st.tuples(
    st.one_of(st.binary(min_size=1, max_size=200), FRAMES, LIES, TRUNCATED),
    st.booleans(),  # after a hello
    st.integers(0, 3),  # descriptors beside it
)


@fuzzed(150)
@given(batch=st.lists(HOSTILE, min_size=BATCH, max_size=BATCH))
def send_bytes(path: Path, sent: Sent, batch: list[tuple[bytes, bool, int]]) -> None:
    for data, greeted, count in batch:
        with Raw(path) as connection, pidfds(count) as fds:
            if greeted:
                connection.greet()
            connection.send(data, fds)
            connection.socket.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while True:
                    answer = connection.reply()
                    assert isinstance(answer, protocol.Failure | protocol.StatusReply), answer
        sent[0] += 1


def test_random_bytes(path: Path) -> None:
    """3,000 cases: no frames, wrong lengths, half frames, with descriptors, before the hello and after it."""
    sent = [0]
    send_bytes(path, sent)
    assert sent[0] >= 3000


# Messages

POOLS = st.sampled_from(["kv", "weights/a", "weights/b", "weights/c"])
TAGS = st.sampled_from(["w", "x", "pages"])
SHORT = st.sampled_from([0.0, 0.001])
EPOCHS = st.integers(0, 5)
MANIFESTS = st.one_of(st.just(b""), st.binary(max_size=40))
DIGESTS = st.dictionaries(TAGS, st.lists(st.binary(min_size=4, max_size=16), max_size=3), max_size=2)
MODES = st.sampled_from(list(LeaseMode))
SIZES = st.one_of(st.integers(1, 65536), st.just(LIMIT + 1), st.just(protocol.MAX_ALLOCATION))
MESSAGES = st.one_of(
    st.builds(protocol.Attach, pool=POOLS, mode=MODES, epoch=EPOCHS, timeout_seconds=SHORT, verify=st.booleans()),
    st.builds(protocol.Allocate, pool=POOLS, tag=TAGS, size_bytes=SIZES, timeout_seconds=SHORT),
    st.builds(protocol.Export, pool=POOLS, tag=TAGS, first=st.integers(0, 9)),
    st.builds(protocol.PutManifest, pool=POOLS, manifest=MANIFESTS),
    st.builds(protocol.GetManifest, pool=POOLS),
    st.builds(protocol.Commit, pool=POOLS, manifest=MANIFESTS, digests=DIGESTS),
    st.builds(protocol.Verify, pool=POOLS, digests=DIGESTS),
    st.builds(protocol.Release, pool=POOLS, quiesced=st.booleans()),
    st.builds(protocol.GetStatus),
    st.builds(protocol.GetEvents, after=st.integers(0, 100)),
)


@fuzzed(250)
@given(batch=st.lists(MESSAGES, min_size=BATCH, max_size=BATCH))
def send_messages(path: Path, sent: Sent, batch: list[protocol.Request]) -> None:
    with Raw(path).greet() as connection:
        for message in batch:
            answer = connection.ask(message)
            if isinstance(answer, protocol.Failure):
                assert answer.code not in (protocol.ErrorCode.INTERNAL, protocol.ErrorCode.BAD_MESSAGE), answer
                assert answer.message.endswith("."), answer
            sent[0] += 1
        assert isinstance(connection.ask(protocol.GetStatus()), protocol.StatusReply)


def test_messages_in_a_wrong_order(path: Path) -> None:
    """5,000 cases: each is answered, and the connection goes on."""
    sent = [0]
    send_messages(path, sent)
    assert sent[0] >= 5000


@fuzzed(60)
@given(batches=st.lists(st.lists(MESSAGES, min_size=5, max_size=5), min_size=4, max_size=4))
def send_messages_at_once(path: Path, sent: Sent, batches: list[list[protocol.Request]]) -> None:
    """Four connections, each with one request under way; some hang up on theirs."""
    with ExitStack() as stack:
        connections = [stack.enter_context(Raw(path).greet()) for _ in batches]
        for round_ in zip(*batches, strict=True):
            for connection, message in zip(connections, round_, strict=True):
                connection.send(protocol.encode(message))
                sent[0] += 1
            for connection in connections[1:]:
                connection.reply()
            connections[0].close()
            connections[0] = stack.enter_context(Raw(path).greet())


def test_messages_of_several_clients_at_once(path: Path) -> None:
    """1,200 cases."""
    sent = [0]
    send_messages_at_once(path, sent)
    assert sent[0] >= 1200


# Hand-backs


class Things:
    """Descriptors of everything that is not the service's pages."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        reading, writing = os.pipe2(os.O_CLOEXEC)
        left, right = socket.socketpair()
        self.fds += [reading, writing, left.detach(), right.detach()]
        self.fds.append(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.fds.append(os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC))
        self.fds.append(os.open("/dev/zero", os.O_PATH | os.O_CLOEXEC))
        self.fds.append(os.eventfd(0, os.EFD_CLOEXEC))
        self.fds.append(os.pidfd_open(os.getpid()))
        for size in (0, 4096, 8192, 1 << 30):
            self.fds.append(os.memfd_create("gms:w", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(self.fds[-1], size)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


COUNTS = st.integers(1, 4)
PARTS = st.lists(
    st.builds(protocol.Part, tag=TAGS, first=st.sampled_from([0, 1, 7, (1 << 32) - 1]), count=COUNTS),
    min_size=1,
    max_size=3,
)
HAND_BACKS = st.tuples(
    st.sampled_from(["kv", "weights/a", "weights/witness"]),
    st.one_of(st.integers(0, 8), st.just((1 << 62) - 1)),
    MODES,
    EPOCHS,
    PARTS,
    st.booleans(),
    st.sampled_from([0, 0, 0, 0, 1, -1]),  # descriptors too many, or too few
    st.lists(st.integers(0, 12), min_size=13, max_size=13),
)


@fuzzed(60)
@given(batch=st.lists(HAND_BACKS, min_size=BATCH, max_size=BATCH))
def hand_back(path: Path, sent: Sent, things: Things, batch: list[tuple[Any, ...]]) -> None:
    with ExitStack() as stack:
        connection = stack.enter_context(Raw(path).greet())
        for pool, generation, mode, epoch, parts, more, off, chosen in batch:
            due = sum(part.count for part in parts)
            fds = [things.fds[index] for index in chosen[: due + off]]
            message = protocol.Adopt(
                pool=pool, generation=generation, mode=mode, epoch=epoch, parts=parts, more=more, fds=len(fds)
            )
            answer = connection.ask(message, fds)
            sent[0] += 1
            assert isinstance(answer, protocol.Failure), answer
            if answer.code == protocol.ErrorCode.BAD_FDS:
                assert connection.hung_up()
                connection = stack.enter_context(Raw(path).greet())


def test_hand_backs_of_other_things(path: Path) -> None:
    """1,200 cases: pipes, sockets, folders, devices, pidfds, foreign memory, in wrong numbers and for wrong pools."""
    sent, things = [0], Things()
    try:
        hand_back(path, sent, things)
    finally:
        things.close()
    assert sent[0] >= 1200
