"""KV memory over a real service: a wake that fails half way must not cost the next engine anything."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gms.client import GmsClient, GmsError, Lease
from gms.custody_phases import Phase
from gms.mapping import Backing, Reservation
from tests.support.processes import Process, running, until
from workers.kv_index import FINGERPRINT_BYTES, TOKEN_BYTES, Entry, Refusal, Shape
from workers.kv_memory import Carried, KvMemory
from workers.memory import MemoryService
from workers.promotion import is_hopeless

pytestmark = pytest.mark.process

SIZE = 1 << 20


@pytest.fixture
def gms(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """Its parameter is more flags."""
    folder = tmp_path / "pod"
    folder.mkdir(mode=0o700)
    with running(
        "gms", "gms", "--socket", str(folder / "gms.sock"), *getattr(request, "param", []), log_dir=tmp_path
    ) as process:
        until((folder / "gms.sock").exists, saying="the service's socket")
        yield process


@pytest.fixture
def service(gms: Process, tmp_path: Path) -> MemoryService:
    return MemoryService(
        socket=str(tmp_path / "pod" / "gms.sock"),
        device="cpu:0",
        engine="a",
        instance="pod",
        timeout_seconds=10,
        connect_seconds=1,
        proof_seconds=20,
    )


class BrokenReservation(Reservation):
    """Addresses that nothing can be mapped at."""

    def map(self, *_: object, **__: object) -> None:
        raise OSError("no mapping today")


def test_a_failed_map_hands_the_same_pages_to_the_next_epoch_at_once(service: MemoryService) -> None:
    first = KvMemory(service, size_bytes=SIZE)
    first.map(epoch=1)
    first.range.buffer()[0:4] = b"kept"
    first.unmap()

    broken = KvMemory(service, size_bytes=SIZE)
    broken.range.close()
    broken.range = BrokenReservation(SIZE)
    with pytest.raises(OSError, match="no mapping today"):
        broken.map(epoch=2)
    assert not broken.mapped
    assert broken.range.backing is Backing.NONE

    asked = time.monotonic()
    first.map(epoch=3)
    assert time.monotonic() - asked < service.proof_seconds / 2
    assert bytes(first.range.buffer()[0:4]) == b"kept"
    first.close()
    broken.close()


def test_unmapping_after_the_service_died_is_no_error(service: MemoryService, gms: Process) -> None:
    kv = KvMemory(service, size_bytes=SIZE)
    kv.map(epoch=1)
    gms.end()
    kv.range.buffer()[0:4] = b"mine"  # the pages outlive the service while they are mapped
    kv.unmap()
    assert not kv.mapped
    with pytest.raises(GmsError, match=r"gms\.sock"):
        kv.map(epoch=2)
    kv.close()


def test_a_service_that_dies_while_it_is_asked_is_asked_again(
    service: MemoryService, gms: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stands, and the lease is asked for, when it dies; the next one is there a moment later."""
    attach, died = GmsClient.attach, 0

    with ExitStack() as stack:

        def dying(client: GmsClient, *arguments: Any, **more: Any) -> Lease:
            nonlocal died
            if not died:
                died += 1
                gms.end()
                stack.enter_context(running("gms-2", "gms", "--socket", service.socket, log_dir=tmp_path))
            return attach(client, *arguments, **more)

        monkeypatch.setattr(GmsClient, "attach", dying)
        kv = KvMemory(msgspec.structs.replace(service, connect_seconds=10), size_bytes=SIZE)
        kv.map(epoch=1)
        assert died
        (state,) = kv.custody()
        assert (state.pool, state.phase, state.restored) == ("kv", Phase.HELD, 0)
        kv.close()
        assert kv.custody() == ()


def test_a_parked_engine_has_handed_its_pages_on_though_the_service_was_away(
    service: MemoryService, gms: Process, tmp_path: Path
) -> None:
    first = KvMemory(msgspec.structs.replace(service, hand_on_seconds=10), size_bytes=SIZE)
    first.map(epoch=1)
    first.range.buffer()[0:4] = b"kept"
    gms.end()
    until(lambda: first.custody()[0].phase is Phase.ADRIFT, saying="it has noticed")
    parking = threading.Thread(target=first.close)
    parking.start()
    with running("gms-2", "gms", "--socket", service.socket, log_dir=tmp_path):
        parking.join(10)
        second = KvMemory(msgspec.structs.replace(service, connect_seconds=10), size_bytes=SIZE)
        second.map(epoch=2)
        assert bytes(second.range.buffer()[0:4]) == b"kept"
        second.close()


HOLDER = """
import sys
from gms.client import GmsClient, LeaseMode
client = GmsClient.connect(sys.argv[1], engine="a", instance="pod")
pages = client.attach("kv", LeaseMode.RW, epoch=1).allocate("kv", int(sys.argv[2]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, gms: Process) -> Iterator[subprocess.Popen[str]]:
    """An engine that has the KV pages and does not end by itself."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "pod" / "gms.sock"), str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("gms", [["--memory-limit", str(SIZE + SIZE // 2)]], indirect=True)
def test_a_takeover_without_proof_waits_for_the_room_that_the_old_holder_leaves(
    service: MemoryService, holder: subprocess.Popen[str]
) -> None:
    """It gets pages of its own, and there is no room for both."""
    kv = KvMemory(msgspec.structs.replace(service, proof_seconds=0.05), size_bytes=SIZE)
    mapping = threading.Thread(target=kv.map, kwargs={"epoch": 2})
    mapping.start()
    with service.connect() as client:
        until(lambda: bool(client.status().memory_waits), saying="it waits for memory")
        assert client.status().pools[0].orphaned_bytes == SIZE
        holder.kill()
        mapping.join(10)
        assert kv.mapped
        assert client.status().total_bytes == SIZE
    kv.close()


@pytest.mark.parametrize("gms", [["--memory-limit", str(SIZE + SIZE // 2)]], indirect=True)
def test_room_that_does_not_come_in_time_is_a_refusal_that_may_be_repeated(
    service: MemoryService, holder: subprocess.Popen[str]
) -> None:
    kv = KvMemory(msgspec.structs.replace(service, proof_seconds=0.05, memory_wait_seconds=0.1), size_bytes=SIZE)
    with pytest.raises(GmsError) as refused:
        kv.map(epoch=2)
    assert (refused.value.code, refused.value.retryable) == ("out_of_memory", True)
    assert not is_hopeless(refused.value)
    holder.kill()
    holder.wait()
    kv.map(epoch=3)
    kv.close()


SHAPE = Shape(blocks=8, block_tokens=16, fingerprint=bytes(FINGERPRINT_BYTES))


def test_an_index_is_believed_only_beside_the_pages_of_the_other_ranks_it_was_written_beside(
    service: MemoryService,
) -> None:
    kept = KvMemory(service, size_bytes=SIZE)
    kept.keep_index(SHAPE)
    kept.map(epoch=1, marks=[b"one", b"two"])
    assert kept.index is not None
    kept.index.publish(Entry(3, b"prefix", 16))
    kept.unmap()

    kept.map(epoch=2, marks=[b"one", b"two"])
    assert [entry.key for entry in kept.carried.entries] == [b"prefix"]
    kept.unmap()
    kept.map(epoch=3, marks=[b"one", b"other"])
    assert kept.carried == Carried((), Refusal.OTHER_PAGES)
    kept.unmap()
    kept.map(epoch=4, marks=[b"one", b"two"])  # nobody knows any more what was written since
    assert kept.carried == Carried((), Refusal.OTHER_PAGES)
    kept.unmap()
    kept.map(epoch=5, marks=[b"one", b"two"])
    assert kept.carried == Carried([], None)
    kept.close()


def test_pages_are_marked_anew_once_they_are_new_or_were_somebodys_who_keeps_no_index(service: MemoryService) -> None:
    follower, other = KvMemory(service, size_bytes=SIZE), KvMemory(service, size_bytes=SIZE)
    follower.follow()
    follower.map(epoch=1)
    first = follower.mark
    assert len(first) == TOKEN_BYTES
    follower.unmap()
    follower.map(epoch=2)
    assert follower.mark == first
    follower.unmap()
    other.map(epoch=3)
    assert other.mark == b""
    other.unmap()
    follower.map(epoch=4)
    assert len(follower.mark) == TOKEN_BYTES
    assert follower.mark != first
    for memory in (follower, other):
        memory.close()
