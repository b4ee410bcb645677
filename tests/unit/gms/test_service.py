"""The service over a backend whose slow calls the test holds in its hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from gms import protocol
from gms.backends.base import OutOfMemoryError, StillMappedError
from gms.protocol import GmsError, LeaseMode
from gms.service import Client, MemoryService

SLICE = 64
A = Client(1, "engine", "a", "i", 11)
B = Client(2, "engine", "b", "i", None)


@dataclass(eq=False)
class FakePages:
    size_bytes: int
    populated: list[int] = field(default_factory=list)
    destroyed: bool = False


class FakeBackend:
    """Counts what is alive. `gate`, when closed, holds up populate; `full` and `mapped` make it fail."""

    granularity = 16
    slice_bytes = SLICE

    def __init__(self) -> None:
        self.alive: list[FakePages] = []
        self.gate = threading.Event()
        self.gate.set()
        self.populating = threading.Event()
        self.full = False
        self.mapped = False

    def create(self, tag: str, size_bytes: int) -> FakePages:
        self.alive.append(FakePages(size_bytes))
        return self.alive[-1]

    def populate(self, pages: FakePages, offset: int, length: int) -> None:
        self.populating.set()
        assert self.gate.wait(10)
        assert not pages.destroyed
        if self.full and offset:
            raise OutOfMemoryError("no room")
        pages.populated.append(length)

    def freeze(self, pages: FakePages) -> None:
        if self.mapped:
            raise StillMappedError

    def share(self, pages: FakePages, *, writable: bool) -> int:
        assert sum(pages.populated) == pages.size_bytes
        return 1000 + writable

    def destroy(self, pages: FakePages) -> None:
        assert not pages.destroyed
        pages.destroyed = True
        self.alive.remove(pages)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def service(backend: FakeBackend) -> AsyncIterator[MemoryService[FakePages]]:
    service = MemoryService(backend, device="cpu:0", limit_bytes=1024)
    service.join(A)
    service.join(B)
    yield service
    backend.gate.set()
    service.close()
    assert backend.alive == []


def attach(pool: str, mode: LeaseMode = LeaseMode.RW, epoch: int = 0, seconds: float = 10.0) -> protocol.Attach:
    return protocol.Attach(pool=pool, mode=mode, epoch=epoch, timeout_seconds=seconds)


Service = MemoryService[FakePages]


async def test_pages_are_rounded_populated_in_slices_and_shared(service: Service, backend: FakeBackend) -> None:
    await service.attach(A, attach("kv"))
    pages, fd = await service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=130))
    assert (pages.size_bytes, pages.created, pages.fds, fd) == (144, True, 1, 1001)
    assert backend.alive[0].populated == [64, 64, 16]


async def test_a_failure_half_way_leaves_nothing(service: Service, backend: FakeBackend) -> None:
    backend.full = True
    await service.attach(A, attach("kv"))
    with pytest.raises(GmsError, match="no room") as caught:
        await service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=130))
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
    assert service.status().total_bytes == 0
    backend.full = False
    await service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=130))
    assert len(backend.alive) == 1


async def test_a_cancelled_allocation_leaves_nothing_and_the_loop_runs_on(
    service: Service, backend: FakeBackend
) -> None:
    await service.attach(A, attach("kv", epoch=1))
    backend.gate.clear()
    filling = asyncio.create_task(service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=130)))
    assert await asyncio.to_thread(backend.populating.wait, 10)
    assert service.status().total_bytes == 144
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert service.leave(A.id, proof=False) is False  # it never had a page: its end need not be proved
    assert service.status().total_bytes == 0
    granted = await service.attach(B, attach("kv", epoch=2))
    assert granted.fresh
    backend.gate.set()
    await service.allocate(B, protocol.Allocate(pool="kv", tag="p", size_bytes=144))
    assert [pages.size_bytes for pages in backend.alive] == [144]


async def test_pages_filled_for_a_holder_that_was_fenced_meanwhile(service: Service, backend: FakeBackend) -> None:
    await service.attach(A, attach("kv", epoch=1))
    backend.gate.clear()
    filling = asyncio.create_task(service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=64)))
    assert await asyncio.to_thread(backend.populating.wait, 10)
    await service.attach(B, attach("kv", epoch=2, seconds=0.0))
    backend.gate.set()
    service.leave(A.id, proof=True)
    with pytest.raises(GmsError) as caught:
        await filling
    assert caught.value.code == "fenced"
    assert service.status().total_bytes == 0


async def test_a_hand_over_charges_the_new_holder(service: Service) -> None:
    await service.attach(A, attach("kv", epoch=1))
    await service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=64))
    assert service.status().bytes_by_owner == {"engine a (pid 11)": 64}
    assert service.leave(A.id, proof=False) is True
    taking = asyncio.create_task(service.attach(B, attach("kv", epoch=2)))
    await asyncio.sleep(0)
    assert service.status().pools[0].waiting == 1
    service.leave(A.id, proof=True)
    granted = await taking
    assert (granted.fresh, [info.tag for info in granted.allocations]) == (False, ["p"])
    assert service.status().bytes_by_owner == {"engine b": 64}


async def test_a_refused_commit_can_be_repeated(service: Service, backend: FakeBackend) -> None:
    await service.attach(A, attach("weights/x"))
    await service.allocate(A, protocol.Allocate(pool="weights/x", tag="w", size_bytes=64))
    backend.mapped = True
    with pytest.raises(GmsError) as caught:
        await service.commit(A, protocol.Commit(pool="weights/x", manifest=b"m"))
    assert caught.value.code == "still_mapped"
    assert service.status().pools[0].state == "WRITING"
    backend.mapped = False
    granted = await service.commit(A, protocol.Commit(pool="weights/x", manifest=b"m"))
    assert granted.mode is LeaseMode.RO
    assert (await service.attach(B, attach("weights/x", LeaseMode.RO))).manifest == b"m"


async def test_a_replaced_generation_is_destroyed(service: Service, backend: FakeBackend) -> None:
    for client in (A, B):
        await service.attach(client, attach("weights/x"))
        await service.allocate(client, protocol.Allocate(pool="weights/x", tag="w", size_bytes=64))
        await service.commit(client, protocol.Commit(pool="weights/x", manifest=b""))
        service.release(client, protocol.Release(pool="weights/x", quiesced=False))
    assert service.status().total_bytes == 64


async def test_orphans_are_counted_until_their_holder_is_gone(service: Service) -> None:
    await service.attach(A, attach("kv", epoch=1))
    await service.allocate(A, protocol.Allocate(pool="kv", tag="p", size_bytes=1024))
    granted = await service.attach(B, attach("kv", epoch=2, seconds=0.0))
    assert granted.fresh
    with pytest.raises(GmsError, match=r"1024 by kv of engine a \(pid 11\)"):
        await service.allocate(B, protocol.Allocate(pool="kv", tag="p", size_bytes=1024))
    assert service.status().pools[0].orphaned_bytes == 1024
    service.leave(A.id, proof=True)
    await service.allocate(B, protocol.Allocate(pool="kv", tag="p", size_bytes=1024))
