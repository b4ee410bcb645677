"""KV memory and weights over stand-in connections: what is left when a step fails, and what is asked for again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest

from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.connection import Connection
from gms.custody_phases import Phase
from gms.mapping import Backing, Reservation
from gms.protocol import ErrorCode, Granted
from workers.kv_memory import KvMemory
from workers.memory import KV_POOL, MemoryService
from workers.weights import WeightsMemory, pool_name

DEADLINE = 10.0
SIZE = 65536
POOL = pool_name("w")


def gone() -> GmsError:
    return GmsError(ErrorCode.SERVICE_GONE, "it went away", retryable=True)


class FakeClient:
    """A connection whose calls succeed, or fail at the one that is named."""

    def __init__(self, *, mode: LeaseMode = LeaseMode.RW, **fails: Exception) -> None:
        self._mode = mode
        self._fails = fails
        self._ours, self._service = socket.socketpair()
        self.did: list[str] = []
        self.allocated: list[Allocation] = []
        self.waited: list[float] = []
        self.waits = threading.Event()
        self.closed = threading.Event()

    def fileno(self) -> int:
        return self._ours.fileno()

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._ours.close()
        self._service.close()

    def attach(self, pool: str, mode: LeaseMode, **_: Any) -> Lease:
        self.do("attach")
        return FakeLease(self, pool, self._mode)

    def adopt(self, pool: str, *, mode: LeaseMode, **_: Any) -> Lease:
        self.do(f"adopt_{mode}")
        return FakeLease(self, pool, mode)

    def do(self, call: str) -> None:
        self.did.append(call)
        if call in self._fails:
            raise self._fails[call]

    def hang(self) -> None:
        """Until its owner closes the connection."""
        self.waits.set()
        assert self.closed.wait(DEADLINE)
        raise GmsError(ErrorCode.CLOSED, "closed by its owner")


class Hanging(FakeClient):
    def attach(self, pool: str, mode: LeaseMode, **_: Any) -> Lease:
        self.hang()
        raise AssertionError


class FakeLease(Lease):
    def __init__(self, client: FakeClient, pool: str, mode: LeaseMode) -> None:
        manifest = b"" if pool == KV_POOL else b"m"
        granted = Granted(mode=mode, generation=1, fresh=False, manifest=manifest, allocations=[])
        super().__init__(cast(Connection, None), pool, 1, granted, [], on_release=lambda _: None)
        self.client = client

    def allocate(self, tag: str, size_bytes: int, *, timeout_seconds: float = 0.0) -> Allocation:
        self.client.waited.append(timeout_seconds)
        self.client.do("allocate_in_time" if timeout_seconds else "allocate")
        return self._pages(tag, size_bytes)

    def export(self, tag: str) -> Allocation:
        self.client.do("export")
        return self._pages(tag, SIZE)

    def _pages(self, tag: str, size_bytes: int) -> Allocation:
        fd = os.memfd_create(tag)
        os.ftruncate(fd, size_bytes)
        self.client.allocated.append(Allocation(tag, size_bytes, size_bytes, [fd], created=True))
        return self.client.allocated[-1]

    def commit(self, manifest: bytes, *, digests: Any = None) -> None:
        self.client.do("commit")
        self.mode, self.manifest = LeaseMode.RO, manifest

    def release(self, *, quiesced: bool = False) -> None:
        self.client.do("release_quiesced" if quiesced else "release")


class FakeService(MemoryService, frozen=True, kw_only=True):
    """What is connected to, in turn; an error is raised, and the last entry stays."""

    found: list[Any]
    dialled: threading.Event = msgspec.field(default_factory=threading.Event)

    def connect(self) -> GmsClient:
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, Exception):
            raise found
        return cast(GmsClient, found)

    def dial(self) -> GmsClient:
        self.dialled.set()
        return self.connect()


def service(*found: FakeClient | Exception, **more: Any) -> FakeService:
    return FakeService(
        socket="/s", device="cpu:0", engine="a", instance="i", timeout_seconds=10, found=list(found), **more
    )


class Breakable(Reservation):
    """An address range where mapping or unmapping fails as long as it is told to."""

    no_map: Exception | None = None
    no_unmap: Exception | None = None

    def map(self, *what: Any, **how: Any) -> None:
        if self.no_map is not None:
            raise self.no_map
        super().map(*what, **how)

    def unmap(self) -> None:
        if self.no_unmap is not None:
            raise self.no_unmap
        super().unmap()


@pytest.fixture(autouse=True)
def no_thread_and_no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert "gms-custody" not in {thread.name for thread in threading.enumerate()}
    assert len(os.listdir("/proc/self/fd")) == before


Make = Callable[..., tuple[KvMemory, Breakable]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[KvMemory, Breakable]] = []

    def kv(*found: FakeClient | Exception, **more: Any) -> tuple[KvMemory, Breakable]:
        memory = KvMemory(service(*found, **more), size_bytes=SIZE)
        memory.range.close()
        memory.range = place = Breakable(SIZE)
        made.append((memory, place))
        return memory, place

    yield kv
    for memory, place in made:
        place.no_unmap = None
        memory.close() if memory.mapped else place.close()


def full(*, retryable: bool) -> GmsError:
    return GmsError(ErrorCode.OUT_OF_MEMORY, "no room", retryable=retryable)


def test_pages_wait_for_room_that_will_come(make: Make) -> None:
    client = FakeClient(allocate=full(retryable=True))
    kv, _ = make(client, memory_wait_seconds=3.0)
    kv.map(epoch=1)
    assert client.waited == [0.0, 3.0]
    kv.unmap()
    assert client.did == ["attach", "allocate", "allocate_in_time", "release_quiesced"]
    assert client.closed.is_set()


@pytest.mark.parametrize(("retryable", "seconds"), [(False, 3.0), (True, 0.0)])
def test_pages_do_not_wait_for_room_that_will_not_come(make: Make, retryable: bool, seconds: float) -> None:
    client = FakeClient(allocate=full(retryable=retryable))
    kv, _ = make(client, memory_wait_seconds=seconds)
    with pytest.raises(GmsError) as refused:
        kv.map(epoch=1)
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.OUT_OF_MEMORY, retryable)
    assert client.waited == [0.0]


def test_pages_that_could_not_be_unmapped_are_held_on_to(make: Make) -> None:
    client = FakeClient()
    kv, place = make(client)
    kv.map(epoch=1)
    place.no_unmap = OSError(12, "no memory for that")
    for _ in range(2):
        with pytest.raises(OSError, match="no memory for that"):
            kv.unmap()
        assert kv.mapped
        assert kv.custody()[0].phase is Phase.HELD
        assert "release_quiesced" not in client.did
    place.no_unmap = None
    kv.unmap()
    assert not kv.mapped
    assert client.did[-1] == "release_quiesced"


def test_closing_over_pages_that_cannot_be_unmapped_vouches_for_nothing(make: Make) -> None:
    """The next engine must wait for the end of this process, which the end of the connection leaves to the service."""
    client = FakeClient()
    kv, place = make(client)
    kv.map(epoch=1)
    place.no_unmap = OSError(12, "no memory for that")
    with pytest.raises(OSError, match="no memory for that"):
        kv.close()
    assert not kv.mapped
    assert client.did == ["attach", "allocate"]
    assert client.closed.is_set()


@pytest.mark.parametrize("unmaps", [True, False])
@pytest.mark.parametrize("releases", [True, False])
def test_the_first_error_of_a_map_is_the_one_that_is_raised(make: Make, unmaps: bool, releases: bool) -> None:
    fails = {} if releases else {"release_quiesced": OSError(9, "nor can it be released")}
    client = FakeClient(**fails)
    kv, place = make(client)
    place.no_map = OSError(1, "it cannot be mapped")
    place.no_unmap = None if unmaps else OSError(12, "nor can it be unmapped")
    with pytest.raises(OSError, match="it cannot be mapped") as caught:
        kv.map(epoch=1)
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert ("nor can it be unmapped" in notes) is not unmaps
    assert ("nor can it be released" in notes) is (unmaps and not releases)
    assert ("release_quiesced" in client.did) is unmaps, "nobody vouches for pages that may be mapped"
    assert client.closed.is_set()
    assert not kv.mapped


def test_a_custody_that_cannot_begin_leaves_nothing_mapped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = FakeClient()
    kv, place = make(client)
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with pytest.raises(RuntimeError, match="new thread"):
        kv.map(epoch=1)
    assert place.backing is Backing.NONE
    assert client.did == ["attach", "allocate", "release_quiesced"]


def test_services_that_die_one_after_the_other_are_asked_in_turn(make: Make) -> None:
    dying = [FakeClient(attach=gone()), FakeClient(allocate=gone())]
    kv, _ = make(dying[0], gone(), dying[1], FakeClient())
    kv.map(epoch=1)
    assert all(client.closed.is_set() for client in dying)


@pytest.mark.parametrize("code", [ErrorCode.SIZE_MISMATCH, ErrorCode.STALE_EPOCH, ErrorCode.BUSY])
def test_what_a_service_refuses_is_not_asked_again(make: Make, code: ErrorCode) -> None:
    client = FakeClient(allocate=GmsError(code, "no", retryable=True))
    kv, _ = make(client)
    with pytest.raises(GmsError) as caught:
        kv.map(epoch=1)
    assert caught.value.code == code
    assert client.did == ["attach", "allocate", "release_quiesced"]


def test_a_service_that_stays_away_is_not_waited_for_for_ever(make: Make) -> None:
    kv, _ = make(FakeClient(attach=gone()), gone(), connect_seconds=0.1)
    with pytest.raises(GmsError, match="it went away"):
        kv.map(epoch=1)


def test_a_wait_can_be_ended_from_another_thread(make: Make) -> None:
    client = Hanging()
    kv, _ = make(client)
    caught: list[BaseException] = []

    def map_() -> None:
        try:
            kv.map(epoch=1)
        except GmsError as error:
            caught.append(error)

    thread = threading.Thread(target=map_)
    thread.start()
    assert client.waits.wait(DEADLINE)
    kv.interrupt()
    thread.join(DEADLINE)
    assert [cast(GmsError, error).code for error in caught] == [ErrorCode.CLOSED]
    assert not kv.mapped


def test_after_that_nothing_is_mapped_any_more(make: Make) -> None:
    client = FakeClient()
    kv, _ = make(client)
    kv.interrupt()
    with pytest.raises(GmsError, match="ended by its owner"):
        kv.map(epoch=1)
    assert (client.did, client.closed.is_set()) == ([], True)


def test_the_writer_is_in_custody_from_its_commit_on_and_reads_the_pages_it_wrote() -> None:
    client = FakeClient(allocate=full(retryable=True))
    weights = WeightsMemory(service(client, memory_wait_seconds=3.0), POOL)
    weights.attach()
    assert (weights.role, weights.custody()) == ("writer", ())
    weights.map_for_writing(SIZE).write(0, b"weights")
    weights.commit(b"manifest")
    (state,) = weights.custody()
    assert (state.pool, state.phase, weights.manifest) == (POOL, Phase.HELD, b"manifest")
    place = weights.map_for_reading()
    assert (place.backing, place.read(0, 7)) == (Backing.PAGES_RO, b"weights")
    assert weights.holds(place.address, SIZE)
    assert not weights.holds(place.address, SIZE + 1)
    assert client.waited == [0.0, 3.0]
    weights.close()
    weights.close()
    assert client.did == ["attach", "allocate", "allocate_in_time", "commit"]


def test_a_reader_is_in_custody_before_it_maps_anything() -> None:
    weights = WeightsMemory(service(FakeClient(mode=LeaseMode.RO)), POOL)
    weights.attach()
    assert (weights.role, weights.manifest, len(weights.custody())) == ("reader", b"m", 1)
    assert weights.map_for_reading().backing is Backing.PAGES_RO
    weights.close()


def test_a_service_that_dies_before_the_weights_are_there_is_followed_by_another() -> None:
    dying = [FakeClient(attach=gone()), FakeClient(mode=LeaseMode.RO, export=gone())]
    weights = WeightsMemory(service(*dying, FakeClient(mode=LeaseMode.RO)), POOL)
    weights.attach()
    assert weights.role == "reader"
    assert all(client.closed.is_set() for client in dying)
    weights.close()


def test_a_commit_whose_service_died_is_done_by_the_next() -> None:
    mismatch = GmsError(ErrorCode.MISMATCH, "it was not committed")
    first, second = FakeClient(commit=gone()), FakeClient(adopt_ro=mismatch)
    weights = WeightsMemory(service(first, gone(), second), POOL)
    weights.attach()
    weights.map_for_writing(SIZE).write(0, b"weights")
    weights.commit(b"manifest")
    assert second.did == ["adopt_ro", "adopt_rw", "commit"]
    assert weights.map_for_reading().read(0, 7) == b"weights"
    assert first.closed.is_set()
    weights.close()
    assert second.closed.is_set()


def test_pages_that_no_service_knows_leave_nothing_behind() -> None:
    mismatch = GmsError(ErrorCode.MISMATCH, "what is this")
    second = FakeClient(adopt_ro=mismatch, adopt_rw=mismatch)
    weights = WeightsMemory(service(FakeClient(commit=gone()), second), POOL)
    weights.attach()
    weights.map_for_writing(SIZE)
    with pytest.raises(GmsError, match="write them anew"):
        weights.commit(b"manifest")
    weights.close()


def test_a_commit_that_waits_for_a_service_can_be_ended() -> None:
    away = service(FakeClient(commit=gone()), gone())
    weights = WeightsMemory(away, POOL)
    weights.attach()
    weights.map_for_writing(SIZE)
    caught: list[BaseException] = []

    def commit() -> None:
        try:
            weights.commit(b"manifest")
        except GmsError as error:
            caught.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    assert away.dialled.wait(DEADLINE)
    weights.interrupt()
    thread.join(DEADLINE)
    assert [cast(GmsError, error).code for error in caught] == [ErrorCode.CLOSED]
    weights.close()
