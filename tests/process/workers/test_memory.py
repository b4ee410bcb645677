"""KV memory over a real service: a wake that fails half way must not cost the next engine anything."""

from __future__ import annotations

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
from workers.memory import KvMemory, MemoryService

pytestmark = pytest.mark.process

SIZE = 1 << 20


@pytest.fixture
def gms(tmp_path: Path) -> Iterator[Process]:
    folder = tmp_path / "pod"
    folder.mkdir(mode=0o700)
    with running("gms", "gms", "--socket", str(folder / "gms.sock"), log_dir=tmp_path) as process:
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
        proof_seconds=5,
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
