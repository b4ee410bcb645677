"""The store over a backend whose calls the test holds in its hand. Nothing may be half-allocated, whatever fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from gms import store as store_module
from gms.allocations import AllocationTable, Entry
from gms.backends.base import DeviceError, OutOfMemoryError, StillMappedError
from gms.events import EventLog
from gms.integrity import pieces
from gms.protocol import ErrorCode, GmsError
from gms.store import PageStore, Surroundings
from tests.unit.gms.memory_backend import CHUNK, SLICE, Chunk, FileBackend, Plain, descriptors, turns
from tests.unit.gms.service_bench import manifest

LIMIT = 6 * CHUNK


@dataclass
class Bench:
    """A store and all around it."""

    backend: FileBackend
    table: AllocationTable[Chunk]
    events: EventLog
    failures: list[DeviceError]
    store: PageStore[Chunk]

    def entry(self, size: int = CHUNK, tag: str = "p", *, pool: str = "kv", generation: int = 1) -> Entry[Chunk]:
        return Entry(pool, generation, tag, size, CHUNK, "engine a")

    async def allocate(
        self,
        entry: Entry[Chunk],
        *,
        seconds: float = 0.0,
        evict: Callable[[int], bool] = lambda missing_bytes: False,
        lasting_bytes: Callable[[], int] = lambda: 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Entry[Chunk]:
        around = Surroundings(evict=evict, lasting_bytes=lasting_bytes, wanted=wanted)
        await self.store.allocate(entry, seconds=seconds, around=around)
        return entry

    def start(self, entry: Entry[Chunk], **how: float) -> asyncio.Task[Entry[Chunk]]:
        return asyncio.create_task(self.allocate(entry, seconds=how.get("seconds", 10.0)))

    async def refused(self, entry: Entry[Chunk], **how: float) -> GmsError:
        with pytest.raises(GmsError) as caught:
            await self.allocate(entry, seconds=how.get("seconds", 0.0))
        return caught.value

    async def settle(self) -> None:
        """Until the memory thread has done all that was asked of it."""
        await asyncio.wrap_future(self.store._thread.submit(lambda: None))
        await turns()

    async def nothing_is_left(self) -> None:
        await self.settle()
        assert self.backend.alive == []
        assert (self.table.total_bytes, self.table.generations()) == (0, [])


def make(backend: FileBackend) -> Bench:
    table: AllocationTable[Chunk] = AllocationTable(LIMIT)
    events, failures = EventLog(), list[DeviceError]()
    store = PageStore(backend, table, events, algorithm=Plain, fail=failures.append)
    return Bench(backend, table, events, failures, store)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 10.0)  # what is not told of is not tried again in a test's time
    before = descriptors()
    bench = make(FileBackend())
    yield bench
    bench.backend.release()
    bench.store.close()
    assert bench.backend.alive == []
    assert descriptors() == before


# --- filling


async def test_chunks_are_made_and_filled_in_slices(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(2 * CHUNK + 16))
    assert [chunk.populated for chunk in bench.backend.alive] == [[SLICE, SLICE], [SLICE, SLICE], [16]]
    assert entry.pages == bench.backend.alive
    assert [identity.size_bytes for identity in entry.identities] == [CHUNK, CHUNK, 16]


STEPS = [("create", 1), ("create", 2), ("create", 3), ("identify", 1), ("identify", 3)]
STEPS += [("populate", nth) for nth in range(1, 7)]


@pytest.mark.parametrize(("call", "nth"), STEPS)
@pytest.mark.parametrize(
    ("error", "code"),
    [(OutOfMemoryError("no room"), ErrorCode.OUT_OF_MEMORY), (DeviceError("cuMemCreate failed."), ErrorCode.INTERNAL)],
    ids=["full", "broken"],
)
async def test_a_failure_at_any_step_leaves_nothing(
    bench: Bench, call: str, nth: int, error: Exception, code: str
) -> None:
    bench.backend.fail(call, error, nth)
    entry = bench.entry(3 * CHUNK)
    refusal = await bench.refused(entry)
    assert (refusal.code, refusal.retryable) == (code, code == ErrorCode.OUT_OF_MEMORY)
    assert str(error) in str(refusal)
    await bench.nothing_is_left()
    await bench.allocate(entry)
    assert len(entry.identities) == len(bench.backend.alive) == 3


@pytest.mark.parametrize(("call", "nth"), STEPS)
async def test_a_cancellation_at_any_step_leaves_nothing(bench: Bench, call: str, nth: int) -> None:
    held = bench.backend.hold(call, nth)
    filling = bench.start(bench.entry(3 * CHUNK))
    await held.reached()
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert bench.table.total_bytes == 0
    held.release()
    await bench.nothing_is_left()


async def test_a_chunk_that_is_not_being_made_yet_is_never_made(bench: Bench) -> None:
    held = bench.backend.hold("populate")
    first = bench.start(bench.entry())
    await held.reached()
    second = bench.start(bench.entry(tag="q"))
    await turns()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    held.release()
    await first
    await bench.settle()
    assert bench.backend.count("create") == 1


async def test_closing_right_after_a_cancellation_leaves_nothing(bench: Bench) -> None:
    held = bench.backend.hold("create")
    filling = bench.start(bench.entry())
    await held.reached()
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    held.release()
    bench.store.close()
    assert bench.backend.alive == []


async def test_the_loop_runs_on_while_memory_is_slow(bench: Bench) -> None:
    held = bench.backend.hold("populate")
    filling = bench.start(bench.entry(2 * CHUNK))
    await held.reached()
    async with asyncio.timeout(5):
        assert bench.table.total_bytes == 2 * CHUNK  # both at once cannot exceed the limit
        assert (await bench.refused(bench.entry(LIMIT, "q"))).code == ErrorCode.OUT_OF_MEMORY
        await bench.events.after(0, 0.0)
    held.release()
    await filling


async def test_a_generation_that_goes_while_it_is_filled_stops_the_filling(bench: Bench) -> None:
    held = bench.backend.hold("populate")
    filling = bench.start(bench.entry(3 * CHUNK))
    await held.reached()
    assert bench.store.drop("kv", 1) == 1
    held.release()
    with pytest.raises(GmsError) as caught:
        await filling
    assert caught.value.code == ErrorCode.FENCED
    assert bench.backend.count("create") == 1
    await bench.nothing_is_left()


async def test_a_holder_that_is_fenced_while_it_is_filled_gets_nothing(bench: Bench) -> None:
    held, holder = bench.backend.hold("populate"), [True]
    filling = asyncio.create_task(bench.allocate(bench.entry(3 * CHUNK), wanted=lambda: bool(holder)))
    await held.reached()
    holder.clear()
    held.release()
    with pytest.raises(GmsError) as caught:
        await filling
    assert caught.value.code == ErrorCode.FENCED
    assert bench.backend.count("create") == 1
    await bench.nothing_is_left()


# --- waiting for memory


async def test_those_who_wait_are_served_in_the_order_they_came(bench: Bench) -> None:
    await bench.allocate(bench.entry(LIMIT, generation=1))
    done: list[str] = []
    waiting = []
    for tag, size in (("large", 4 * CHUNK), ("small", CHUNK), ("other", CHUNK), ("last", LIMIT)):
        task = bench.start(bench.entry(size, tag, generation=2))
        task.add_done_callback(lambda _, tag=tag: done.append(tag))
        waiting.append(task)
        await turns()
    assert [line.split(" as ")[1].split(",")[0] for line in bench.store.waits()] == [
        f"{tag!r} in kv" for tag in ("large", "small", "other", "last")
    ]
    bench.store.drop("kv", 1)
    await asyncio.gather(*waiting[:3])
    assert done == ["large", "small", "other"]
    bench.store.drop("kv", 2)
    await waiting[3]
    assert bench.store.waits() == []


async def test_who_would_fit_does_not_overtake_who_waits(bench: Bench) -> None:
    held = await bench.allocate(bench.entry(4 * CHUNK, "held"))
    large = bench.start(bench.entry(4 * CHUNK, "large"))
    await turns()
    small = bench.start(bench.entry(CHUNK, "small"))
    await turns()
    assert not small.done()
    await bench.allocate(bench.entry(CHUNK, "now"))  # who does not wait is in nobody's way for long
    bench.store.discard(held)
    await asyncio.gather(large, small)


async def test_who_gives_up_makes_way(bench: Bench) -> None:
    await bench.allocate(bench.entry(4 * CHUNK, "held"))
    large = bench.start(bench.entry(4 * CHUNK, "large"))
    await turns()
    small = bench.start(bench.entry(CHUNK, "small"))
    await turns()
    large.cancel()
    await small
    with pytest.raises(asyncio.CancelledError):
        await large
    assert bench.table.bytes_in("kv") == 5 * CHUNK


async def test_waiting_has_an_end_that_says_who_holds_what(bench: Bench) -> None:
    await bench.allocate(bench.entry(LIMIT, "held"))
    first = bench.start(bench.entry(CHUNK, "first"), seconds=1.0)
    await turns()
    second = await bench.refused(bench.entry(CHUNK, "second"), seconds=0.01)
    assert "engine a waits for 64 bytes as 'first'" in str(second)
    assert len(bench.store.waits()) == 1
    with pytest.raises(GmsError) as caught:
        await first
    for error in (caught.value, second):
        assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
        assert f"{LIMIT} by kv of engine a" in str(error)
    assert bench.store.waits() == []
    kinds = [event.kind for event in await bench.events.after(0, 0.0)]
    assert kinds == ["memory_wait", "memory_wait"]


async def test_what_never_fits_neither_waits_nor_evicts(bench: Bench) -> None:
    asked: list[int] = []
    await bench.allocate(bench.entry(2 * CHUNK, "there"))
    with pytest.raises(GmsError) as caught:
        await bench.allocate(bench.entry(LIMIT + 16), seconds=10.0, evict=lambda n: bool(asked.append(n)))
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.OUT_OF_MEMORY, False)
    assert asked == [2 * CHUNK + 16]  # more than there is
    assert bench.events.last == 0


async def test_what_never_fits_is_told_at_once_though_others_wait(bench: Bench) -> None:
    held = await bench.allocate(bench.entry(LIMIT, "held"))
    first = bench.start(bench.entry(CHUNK, "first"))
    await turns()
    error = await bench.refused(bench.entry(LIMIT + 16, "huge"), seconds=10.0)
    assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, False)
    bench.store.discard(held)
    await first


async def test_what_living_clients_hold_is_waited_for_by_those_who_want_to_and_is_no_reason_to_try_again(
    bench: Bench,
) -> None:
    held = await bench.allocate(bench.entry(4 * CHUNK, "held"))

    def lasting() -> int:
        return 4 * CHUNK if bench.table.holds(held) else 0

    for seconds in (0.0, 0.01):
        with pytest.raises(GmsError) as caught:
            await bench.allocate(bench.entry(3 * CHUNK), seconds=seconds, lasting_bytes=lasting)
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.OUT_OF_MEMORY, False)
    waiting = asyncio.create_task(bench.allocate(bench.entry(3 * CHUNK), seconds=10.0, lasting_bytes=lasting))
    await turns()
    assert not waiting.done()
    bench.store.discard(held)
    await waiting


async def test_who_waited_behind_another_hears_how_things_are_now(bench: Bench) -> None:
    held = await bench.allocate(bench.entry(LIMIT, "held"))
    first = bench.start(bench.entry(CHUNK, "first"))
    await turns()
    lasting = [0]
    second = asyncio.create_task(
        bench.allocate(bench.entry(CHUNK, "second"), seconds=1.0, lasting_bytes=lambda: lasting[0])
    )
    await turns()
    lasting[0] = LIMIT
    with pytest.raises(GmsError, match="must wait for those who wait") as caught:
        await second
    assert not caught.value.retryable
    bench.store.discard(held)
    await first


async def test_what_nobody_uses_goes_first_and_one_at_a_time(bench: Bench) -> None:
    for number in (1, 2, 3):
        await bench.allocate(bench.entry(2 * CHUNK, pool=f"weights/{number}", generation=number))
    unused, asked = [1, 2, 3], list[int]()

    def evict(missing_bytes: int) -> bool:
        asked.append(missing_bytes)
        number = unused.pop(0)
        return bench.store.drop(f"weights/{number}", number) == 1

    await bench.allocate(bench.entry(3 * CHUNK), evict=evict)
    assert (unused, asked) == ([3], [3 * CHUNK, CHUNK])
    calls = bench.backend.calls
    assert calls.index("destroy p") < calls.index("create p", calls.index("destroy p"))
    assert bench.table.total_bytes == 5 * CHUNK


async def test_a_machine_without_room_evicts_too_and_is_tried_again_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.01)
    bench = make(FileBackend(room=CHUNK + SLICE))
    evictions: list[bool] = []

    def evict(missing_bytes: int) -> bool:
        evictions.append(not evictions)
        return evictions[-1]

    waiting = asyncio.create_task(bench.allocate(bench.entry(2 * CHUNK), seconds=10.0, evict=evict))
    again = bench.backend.hold("create", 5)
    await again.reached()
    assert evictions[:2] == [True, False]
    bench.backend.room = 10 * CHUNK
    again.release()
    await waiting
    bench.store.close()
    assert bench.backend.alive == []


async def test_a_holder_that_is_fenced_while_it_waits_stops_waiting(bench: Bench) -> None:
    held, holder = await bench.allocate(bench.entry(LIMIT, "held")), [True]
    waiting = asyncio.create_task(bench.allocate(bench.entry(CHUNK, "p"), seconds=10.0, wanted=lambda: bool(holder)))
    await turns()
    holder.clear()
    bench.store.discard(held)
    with pytest.raises(GmsError) as caught:
        await waiting
    assert caught.value.code == ErrorCode.FENCED
    await bench.nothing_is_left()


async def test_a_holder_that_is_fenced_while_it_waits_in_vain_is_told_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.01)
    await bench.allocate(bench.entry(LIMIT, "held"))
    holder = [True]
    waiting = asyncio.create_task(bench.allocate(bench.entry(CHUNK), seconds=10.0, wanted=lambda: bool(holder)))
    await turns()
    holder.clear()
    with pytest.raises(GmsError) as caught:
        await waiting
    assert caught.value.code == ErrorCode.FENCED


@pytest.mark.parametrize(
    ("size", "room", "missing"),
    [
        (3 * CHUNK, 2 * CHUNK, 1),  # two are there: less than a third is missing
        (3 * CHUNK, CHUNK, CHUNK + 1),
        (3 * CHUNK, 0, 2 * CHUNK + 1),
        (2 * CHUNK + 16, 2 * CHUNK, 1),
        (2 * CHUNK + 16, CHUNK, 17),
    ],
)
async def test_a_device_that_does_not_say_what_it_has_is_asked_for_no_more_than_may_be_missing(
    size: int, room: int, missing: int
) -> None:
    bench = make(FileBackend(room=room))
    asked: list[int] = []
    with pytest.raises(GmsError):
        await bench.allocate(bench.entry(size), evict=lambda missing_bytes: bool(asked.append(missing_bytes)))
    assert asked == [missing]
    bench.store.close()


async def test_a_device_that_says_what_it_has_is_believed(bench: Bench) -> None:
    asked: list[int] = []
    bench.backend.fail("create", OutOfMemoryError("short of it", room_bytes=CHUNK - 10), 2)
    with pytest.raises(GmsError):
        await bench.allocate(bench.entry(3 * CHUNK), evict=lambda missing_bytes: bool(asked.append(missing_bytes)))
    assert asked == [CHUNK + 10]


# --- a device that fails


async def test_a_broken_device_is_told_of_once(bench: Bench) -> None:
    error = DeviceError("cuMemRelease failed.")
    entry = await bench.allocate(bench.entry(2 * CHUNK))
    for call in ("identify", "digest"):
        bench.backend.fail(call, error)
    for attempt in (bench.store.freeze(entry), bench.store.digests(entry, b"")):
        with pytest.raises(GmsError, match="cuMemRelease failed") as caught:
            await attempt
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.INTERNAL, False)
    assert bench.failures == [error]


@pytest.mark.parametrize("call", ["create", "populate"])
async def test_a_broken_device_is_told_of_although_nobody_waits_any_more(bench: Bench, call: str) -> None:
    held = bench.backend.hold(call)
    bench.backend.fail(call, DeviceError("it broke"))
    filling = bench.start(bench.entry())
    await held.reached()
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    held.release()
    await bench.settle()
    assert [str(error) for error in bench.failures] == ["it broke"]


async def test_memory_that_cannot_be_given_back_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.allocate(bench.entry())
    bench.backend.fail("destroy", DeviceError("it is stuck"))
    bench.store.drop("kv", 1)
    await bench.settle()
    assert "memory could not be given back: it is stuck" in caplog.text
    assert len(bench.failures) == 1
    os.close(bench.backend.alive.pop().fd)


@pytest.mark.parametrize("call", ["create", "populate", "identify"])
async def test_a_mistake_fails_one_request_and_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    bench.backend.fail(call, ValueError("no such thing"))
    error = await bench.refused(bench.entry())
    assert (error.code, error.retryable) == (ErrorCode.INTERNAL, False)
    assert "(ValueError: no such thing); see the service's log" in str(error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
    await bench.nothing_is_left()
    assert bench.failures == []
    await bench.allocate(bench.entry())


async def test_pages_whose_client_left_and_that_cannot_be_given_back_are_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    held = bench.backend.hold("create")
    filling = bench.start(bench.entry())
    await held.reached()
    bench.backend.fail("destroy", OSError(5, "Input/output error"))
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    held.release()
    await bench.settle()
    assert "memory could not be given back: [Errno 5] Input/output error" in caplog.text
    os.close(bench.backend.alive.pop().fd)


# --- digests


async def test_digests_are_of_the_pieces_in_their_order(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(2 * CHUNK + 16))
    for number, chunk in enumerate(bench.backend.alive):
        chunk.write(bytes(range(number * 50, number * 50 + chunk.size_bytes)))
    described = manifest(16, 48, 96, size=entry.size_bytes, tag="p")
    found = await bench.store.digests(entry, described)
    whole = b"".join(os.pread(chunk.fd, chunk.size_bytes, 0) for chunk in bench.backend.alive)
    wanted = pieces(entry.size_bytes, CHUNK, described, "p")
    assert len(wanted) == 6
    assert found == [Plain(whole[piece.at : piece.at + piece.length]).digest() for piece in wanted]


async def test_others_get_their_turn_between_batches_and_small_pieces_share_one(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(2 * CHUNK))
    held = bench.backend.hold("digest")
    hashing = asyncio.create_task(bench.store.digests(entry, manifest(0, 16, 32, 48, size=2 * CHUNK, tag="p")))
    await held.reached()
    other = bench.start(bench.entry(16, "q"))
    await turns()
    held.release()
    await hashing
    await other
    turn = bench.backend.calls.index("create q")
    digests = [at for at, call in enumerate(bench.backend.calls) if call == "digest p"]
    assert len(digests) == 5
    assert [at < turn for at in digests] == [True, True, False, False, False]  # 2 x 16 bytes make a slice


async def test_pages_that_go_while_they_are_hashed_are_destroyed_behind_it(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(2 * CHUNK))
    held = bench.backend.hold("digest")
    hashing = asyncio.create_task(bench.store.digests(entry, b""))
    await held.reached()
    bench.store.drop("kv", 1)
    held.release()
    with pytest.raises(GmsError, match="'p' of kv was given back meanwhile") as caught:
        await hashing
    assert caught.value.code == ErrorCode.NOT_FOUND
    await bench.nothing_is_left()
    calls = bench.backend.calls
    assert calls.index("digest p") < calls.index("destroy p")


async def test_what_is_being_filled_has_no_digest_and_no_descriptor(bench: Bench) -> None:
    held = bench.backend.hold("populate", 3)
    entry = bench.entry(2 * CHUNK)
    filling = bench.start(entry)
    await held.reached()
    with pytest.raises(GmsError) as caught:
        bench.store.share(entry, 0, 8, writable=True)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.NOT_FOUND, True)
    held.release()
    await filling


async def test_a_writable_mapping_keeps_pages_from_being_frozen(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(2 * CHUNK))
    bench.backend.fail("freeze", StillMappedError(), 2)
    with pytest.raises(GmsError, match="writable mapping") as caught:
        await bench.store.freeze(entry)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.STILL_MAPPED, True)
    await bench.store.freeze(entry)
    assert [identity.seals for identity in entry.identities] == [1, 1]


# --- descriptors


async def test_descriptors_of_some_chunks(bench: Bench) -> None:
    entry = await bench.allocate(bench.entry(5 * CHUNK))
    fds = bench.store.share(entry, 3, 64, writable=False)
    assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(c.fd).st_ino for c in bench.backend.alive[3:]]
    first = bench.store.share(entry, 0, 2, writable=True)
    assert len(first) == 2
    for fd in [*fds, *first]:
        os.close(fd)


async def test_descriptors_that_cannot_all_be_had_are_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = await bench.allocate(bench.entry(3 * CHUNK))
    share = bench.backend.share

    def exhausted(pages: Chunk, *, writable: bool) -> int:
        if pages is entry.pages[2]:
            raise OSError(24, "Too many open files")
        return share(pages, writable=writable)

    monkeypatch.setattr(bench.backend, "share", exhausted)
    before = descriptors()
    with pytest.raises(GmsError, match=r"cannot give out 'p' of kv for now: Too many open files. Try again") as caught:
        bench.store.share(entry, 0, 64, writable=True)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.BUSY, True)
    assert descriptors() == before


async def test_a_descriptor_that_is_refused_for_good_is_no_moments_matter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await bench.allocate(bench.entry())

    def broken(pages: Chunk, *, writable: bool) -> int:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(bench.backend, "share", broken)
    with pytest.raises(PermissionError):
        bench.store.share(entry, 0, 64, writable=True)


# --- taking back


@pytest.fixture
async def kept(bench: Bench) -> AsyncIterator[tuple[Entry[Chunk], list[int]]]:
    """An entry of an earlier service, restored without pages, and a client's descriptors of its two chunks."""
    earlier = await bench.allocate(bench.entry(2 * CHUNK, pool="weights/a"))
    await bench.store.freeze(earlier)
    fds = bench.store.share(earlier, 0, 64, writable=False)
    entry = bench.entry(2 * CHUNK, pool="weights/a")
    entry.identities = list(earlier.identities)
    bench.store.drop("weights/a", 1)
    bench.table.restore(entry)
    await bench.settle()
    yield entry, fds
    for fd in fds:
        os.close(fd)


Kept = tuple[Entry[Chunk], list[int]]


async def test_chunks_are_taken_back_in_any_order_and_twice(bench: Bench, kept: Kept) -> None:
    entry, fds = kept
    await bench.store.take_back(entry, 1, fds[1])
    assert not entry.filled
    await bench.store.take_back(entry, 0, fds[0])
    assert entry.filled
    chunks = list(bench.backend.alive)
    await bench.store.take_back(entry, 0, fds[0])  # another reader's copy of the same
    await bench.settle()
    assert bench.backend.alive == chunks
    assert os.fstat(fds[0]).st_size == CHUNK  # the caller's own


@pytest.mark.parametrize("filled", [False, True])
async def test_a_foreign_chunk_is_refused_even_where_there_is_one(bench: Bench, kept: Kept, filled: bool) -> None:
    entry, fds = kept
    if filled:
        await bench.store.take_back(entry, 0, fds[0])
    with pytest.raises(
        GmsError, match="Chunk 0 of 'p' in weights/a is not the one that was given out: it is another"
    ) as caught:
        await bench.store.take_back(entry, 0, fds[1])
    assert caught.value.code == ErrorCode.MISMATCH
    await bench.settle()
    assert len(bench.backend.alive) == filled


async def test_a_moment_without_room_is_no_fault_of_who_hands_back(bench: Bench, kept: Kept) -> None:
    entry, fds = kept
    bench.backend.fail("adopt", OutOfMemoryError("Too many open files"))
    with pytest.raises(GmsError, match=r"cannot be taken back for now \(Too many open files\); keep it") as caught:
        await bench.store.take_back(entry, 0, fds[0])
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
    await bench.store.take_back(entry, 0, fds[0])
    assert entry.pages[0] is not None


async def test_a_moment_without_descriptors_is_no_fault_of_who_hands_back(
    bench: Bench, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, fds = kept

    def none_left(fd: int) -> int:
        raise OSError(23, "Too many open files in system")

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "dup", none_left)
        with pytest.raises(GmsError, match="cannot take back 'p' of weights/a for now") as caught:
            await bench.store.take_back(entry, 0, fds[0])
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.BUSY, True)
    await bench.store.take_back(entry, 0, fds[0])
    assert entry.pages[0] is not None


async def test_there_is_no_chunk_beyond_the_last(bench: Bench, kept: Kept) -> None:
    entry, fds = kept
    with pytest.raises(GmsError, match="has 2 chunks, none is 2") as caught:
        await bench.store.take_back(entry, 2, fds[0])
    assert caught.value.code == ErrorCode.MISMATCH


async def test_a_client_that_goes_meanwhile_takes_its_descriptor_along_and_leaves_nothing(
    bench: Bench, kept: Kept
) -> None:
    entry, fds = kept
    held = bench.backend.hold("adopt")
    taking = asyncio.create_task(bench.store.take_back(entry, 0, fds[0]))
    await held.reached()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    os.dup2(fds[1], fds[0])  # what the number means by now is another's business
    held.release()
    await bench.settle()
    assert bench.backend.alive == []
    assert entry.pages == [None, None]


async def test_pages_that_are_given_up_meanwhile_are_not_kept(bench: Bench, kept: Kept) -> None:
    entry, fds = kept
    held = bench.backend.hold("adopt")
    taking = asyncio.create_task(bench.store.take_back(entry, 0, fds[0]))
    await held.reached()
    bench.store.drop("weights/a", 1)
    held.release()
    await taking
    await bench.nothing_is_left()
