"""The service over a backend whose slow calls the test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gms import protocol
from gms.backends.base import DeviceError, OutOfMemoryError, StillMappedError
from gms.journal import Journal
from gms.protocol import MAX_FDS, ErrorCode, GmsError
from tests.unit.gms.memory_backend import CHUNK, SLICE, descriptors, turns
from tests.unit.gms.service_bench import ANY, RO, RW, WEIGHTS, Engine, Life, manifest

LIMIT = 16 * CHUNK


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    before = descriptors()
    life = Life(tmp_path / "state", limit=LIMIT)
    yield life
    life.end()
    assert descriptors() == before


@pytest.fixture
async def a(life: Life) -> AsyncIterator[Engine]:
    engine = Engine(life, "a")
    yield engine
    engine.close()


@pytest.fixture
async def b(life: Life) -> AsyncIterator[Engine]:
    engine = Engine(life, "b")
    yield engine
    engine.close()


@pytest.fixture
async def c(life: Life) -> AsyncIterator[Engine]:
    engine = Engine(life, "c")
    yield engine
    engine.close()


def code(caught: pytest.ExceptionInfo[GmsError]) -> str:
    return caught.value.code


# --- allocations


async def test_pages_are_rounded_filled_in_slices_and_shared_by_chunk(life: Life, a: Engine) -> None:
    await a.attach("kv")
    pages = await a.allocate("kv", size=CHUNK + 17)
    assert (pages.size_bytes, pages.chunk_bytes, pages.created, pages.fds) == (CHUNK + 32, CHUNK, True, 2)
    assert [chunk.populated for chunk in life.backend.alive] == [[SLICE, SLICE], [32]]
    assert ("allocated", "kv", CHUNK + 32) in life.seen.heard


async def test_a_small_allocation_has_a_small_chunk(a: Engine) -> None:
    await a.attach("kv")
    pages = await a.allocate("kv", size=1)
    assert (pages.size_bytes, pages.chunk_bytes, pages.fds) == (16, 16, 1)


async def test_more_chunks_than_descriptors_in_a_message(tmp_path: Path) -> None:
    life = Life(tmp_path / "state")
    engine = Engine(life, "a")
    await engine.attach("kv")
    pages = await engine.allocate("kv", size=(MAX_FDS + 6) * CHUNK)
    assert (pages.first, pages.fds) == (0, MAX_FDS)
    assert engine.export("kv", first=MAX_FDS).fds == 6
    assert len(engine.fds["kv", "w"]) == MAX_FDS + 6
    with pytest.raises(GmsError) as caught:
        engine.export("kv", first=MAX_FDS + 6)
    assert code(caught) == ErrorCode.NOT_FOUND
    engine.close()
    life.end()


async def test_a_failure_half_way_leaves_nothing(life: Life, a: Engine) -> None:
    await a.attach("kv")
    life.backend.fail("populate", OutOfMemoryError("no room"), 2)
    with pytest.raises(GmsError, match="no room") as caught:
        await a.allocate("kv", size=2 * CHUNK)
    assert (code(caught), caught.value.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
    assert life.service.status().total_bytes == 0
    await a.allocate("kv", size=2 * CHUNK)
    assert len(life.backend.alive) == 2


async def test_a_cancelled_allocation_leaves_nothing_to_be_proved(life: Life, a: Engine, b: Engine) -> None:
    await a.attach("kv", epoch=1)
    held = life.backend.hold("populate")
    filling = asyncio.create_task(a.allocate("kv", size=2 * CHUNK))
    await held.reached()
    assert life.service.status().total_bytes == 2 * CHUNK
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert not a.hang_up()
    granted = await b.attach("kv", epoch=2)
    assert granted.fresh
    held.release()
    await b.allocate("kv", size=CHUNK)
    await life.settle()
    assert len(life.backend.alive) == 1


async def test_a_holder_that_is_fenced_while_its_pages_are_filled_gets_none(life: Life, a: Engine, b: Engine) -> None:
    await a.attach("kv", epoch=1)
    held = life.backend.hold("populate")
    filling = asyncio.create_task(a.allocate("kv", size=2 * CHUNK))
    await held.reached()
    await b.attach("kv", epoch=2, seconds=0.0)
    held.release()
    with pytest.raises(GmsError) as caught:
        await filling
    assert code(caught) == ErrorCode.FENCED
    assert life.service.status().total_bytes == 0


async def test_a_holder_that_is_fenced_while_it_waits_for_memory_makes_way(life: Life, a: Engine, b: Engine) -> None:
    await b.attach(WEIGHTS)
    await b.allocate(WEIGHTS, size=LIMIT)
    await a.attach("kv", epoch=1)
    waiting = asyncio.create_task(a.allocate("kv", size=CHUNK, seconds=10.0))
    await turns()
    assert len(life.service.status().memory_waits) == 1
    await b.attach("kv", epoch=2, seconds=0.0)
    b.release(WEIGHTS, quiesced=True)
    with pytest.raises(GmsError) as caught:
        await waiting
    assert code(caught) == ErrorCode.FENCED
    status = life.service.status()
    assert (status.total_bytes, status.memory_waits) == (0, [])


async def test_a_hand_over_charges_the_new_holder(life: Life, a: Engine, b: Engine) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv")
    assert life.service.status().bytes_by_owner == {"engine a": CHUNK}
    assert a.hang_up()
    taking = asyncio.create_task(b.attach("kv", epoch=2))
    await turns()
    assert life.service.status().pools[0].waiting == 1
    assert not life.service.leave(a.client.id, proof=True)
    granted = await taking
    assert (granted.fresh, [info.tag for info in granted.allocations]) == (False, ["w"])
    assert life.service.status().bytes_by_owner == {"engine b": CHUNK}
    assert not (await b.allocate("kv")).created


async def test_pages_of_another_configuration_are_replaced_and_ones_own_are_not(
    life: Life, a: Engine, b: Engine
) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=CHUNK)
    with pytest.raises(GmsError) as caught:
        await a.allocate("kv", size=2 * CHUNK)
    assert code(caught) == ErrorCode.SIZE_MISMATCH
    a.die()
    await b.attach("kv", epoch=2)
    pages = await b.allocate("kv", size=2 * CHUNK)
    assert (pages.created, pages.size_bytes) == (True, 2 * CHUNK)
    assert life.service.status().total_bytes == 2 * CHUNK


@pytest.mark.parametrize("how", ["allocated", "exported"])
async def test_pages_that_the_new_holder_was_given_are_its_own(life: Life, a: Engine, b: Engine, how: str) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=CHUNK)
    a.die()
    await b.attach("kv", epoch=2)
    if how == "allocated":
        await b.allocate("kv", size=CHUNK)
    else:
        b.export("kv")
    with pytest.raises(GmsError) as caught:
        await b.allocate("kv", size=2 * CHUNK)
    assert code(caught) == ErrorCode.SIZE_MISMATCH


async def test_orphans_are_counted_until_their_holder_is_gone(life: Life, a: Engine, b: Engine) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=LIMIT)
    granted = await b.attach("kv", epoch=2, seconds=0.0)
    assert granted.fresh
    with pytest.raises(GmsError, match=f"{LIMIT} by kv of engine a"):
        await b.allocate("kv", size=CHUNK)
    assert life.service.status().pools[0].orphaned_bytes == LIMIT
    a.die()
    await b.allocate("kv", size=CHUNK)
    assert life.service.status().pools[0].orphaned_bytes == 0


async def test_weights_that_nobody_uses_make_room(life: Life, a: Engine, b: Engine) -> None:
    await a.load(size=LIMIT)
    await b.attach("kv", epoch=1)
    with pytest.raises(GmsError) as caught:
        await b.allocate("kv", size=CHUNK)
    assert code(caught) == ErrorCode.OUT_OF_MEMORY
    a.die()
    with pytest.raises(GmsError) as caught:
        await b.allocate("kv", size=LIMIT + CHUNK)
    assert not caught.value.retryable
    assert life.state(WEIGHTS) == "COMMITTED"
    await b.allocate("kv", size=CHUNK)
    assert life.state(WEIGHTS) == "EMPTY"
    assert "evicted" in await life.kinds()


async def test_memory_that_comes_free_goes_to_who_waits_for_it(life: Life, a: Engine, b: Engine) -> None:
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=LIMIT)
    await b.attach("kv", epoch=1)
    waiting = asyncio.create_task(b.allocate("kv", size=CHUNK, seconds=10.0))
    await turns()
    assert "engine b waits for 64 bytes as 'w' in kv" in life.service.status().memory_waits[0]
    a.die()
    await waiting
    assert life.service.status().memory_waits == []


# --- leases and the end of clients


async def test_pages_staged_before_are_not_dropped_with_an_empty_lease_after(life: Life, a: Engine, b: Engine) -> None:
    """The client may still have the first ones mapped, although it put nothing into its second generation."""
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS)
    a.release(WEIGHTS)
    await a.attach(WEIGHTS)
    a.release(WEIGHTS)
    assert life.service.status().total_bytes == CHUNK
    assert a.hang_up()
    await b.attach(WEIGHTS)
    assert life.service.status().total_bytes == CHUNK
    assert not life.service.leave(a.client.id, proof=True)
    assert life.service.status().total_bytes == 0


async def test_a_replaced_generation_is_destroyed_when_its_last_reader_leaves(
    life: Life, a: Engine, b: Engine, c: Engine
) -> None:
    await a.load()
    await c.read()
    await b.load()
    a.release(WEIGHTS)
    assert life.service.status().total_bytes == 4 * CHUNK
    c.hang_up()
    assert life.service.status().total_bytes == 2 * CHUNK


async def test_what_is_asked_without_the_right_lease_is_refused(life: Life, a: Engine, b: Engine) -> None:
    await a.load()
    await b.read()
    service = life.service
    asked = [
        (ErrorCode.NOT_PERMITTED, b.allocate(WEIGHTS)),
        (ErrorCode.NOT_PERMITTED, b.commit(WEIGHTS)),
        (ErrorCode.NOT_ATTACHED, b.allocate("kv")),
        (ErrorCode.ALREADY_ATTACHED, b.attach(WEIGHTS, RO)),
        (ErrorCode.NOT_PERMITTED, b.attach("kv", RO)),
    ]
    for wanted, attempt in asked:
        with pytest.raises(GmsError) as caught:
            await attempt
        assert code(caught) == wanted
    with pytest.raises(GmsError) as caught:
        b.export("kv")
    assert code(caught) == ErrorCode.NOT_ATTACHED
    with pytest.raises(GmsError) as caught:
        b.export(WEIGHTS, "other")
    assert code(caught) == ErrorCode.NOT_FOUND
    for pool, wanted in ((WEIGHTS, ErrorCode.NOT_PERMITTED), ("kv", ErrorCode.NOT_ATTACHED)):
        with pytest.raises(GmsError) as caught:
            service.put_manifest(b.client, protocol.PutManifest(pool=pool, manifest=b"m"))
        assert code(caught) == wanted
    await b.attach("kv", epoch=1)
    with pytest.raises(GmsError) as caught:
        await b.commit("kv")
    assert code(caught) == ErrorCode.NOT_PERMITTED


async def test_a_fenced_holder_is_told_so_whatever_it_asks(life: Life, a: Engine, b: Engine) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv")
    await b.attach("kv", epoch=2, seconds=0.0)
    for ask in (lambda: a.export("kv"), lambda: life.service.put_manifest(a.client, put("kv"))):
        with pytest.raises(GmsError, match="must stop serving") as caught:
            ask()
        assert code(caught) == ErrorCode.FENCED
    with pytest.raises(GmsError) as caught:
        await a.allocate("kv")
    assert code(caught) == ErrorCode.FENCED


def put(pool: str) -> protocol.PutManifest:
    return protocol.PutManifest(pool=pool, manifest=b"blocks")


async def test_a_manifest_of_kv_passes_from_holder_to_holder_and_anyone_may_ask(
    life: Life, a: Engine, b: Engine
) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv")
    life.service.put_manifest(a.client, put("kv"))
    a.die()
    reply = life.service.get_manifest(protocol.GetManifest(pool="kv"))
    assert (reply.generation, reply.manifest, [info.tag for info in reply.allocations]) == (1, b"blocks", ["w"])
    assert (await b.attach("kv", epoch=2)).manifest == b"blocks"
    empty = life.service.get_manifest(protocol.GetManifest(pool="kv_index"))
    assert (empty.generation, empty.manifest, empty.allocations) == (0, b"", [])


async def test_a_wait_that_is_over_leaves_nothing_in_the_queue(life: Life, a: Engine, b: Engine) -> None:
    await a.attach(WEIGHTS)
    with pytest.raises(GmsError, match="still writing") as caught:
        await b.attach(WEIGHTS, RO, seconds=0.01)
    assert (code(caught), caught.value.retryable) == (ErrorCode.TIMEOUT, True)
    assert life.service.status().pools[0].waiting == 0
    assert life.service._leasing._waiting == {}
    assert ("refused", ErrorCode.TIMEOUT) in life.seen.heard
    assert "waits for weights/x as ro" in (await life.said("waiting"))[0]


@pytest.mark.parametrize("first", ["grant", "end"])
async def test_a_client_that_leaves_while_it_waits_is_granted_nothing(
    life: Life, a: Engine, b: Engine, first: str
) -> None:
    await a.attach(WEIGHTS)
    waiting = asyncio.create_task(b.attach(WEIGHTS, RW))
    await turns()
    if first == "grant":
        a.release(WEIGHTS, quiesced=True)
        waiting.cancel()
    else:
        waiting.cancel()
        a.release(WEIGHTS, quiesced=True)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not b.hang_up()
    assert life.state(WEIGHTS) == "EMPTY"
    assert (await a.attach(WEIGHTS)).mode is RW


async def test_waiters_are_served_when_their_turn_comes_and_deadlines_follow_one_another(
    life: Life, a: Engine, b: Engine, c: Engine
) -> None:
    await a.attach(WEIGHTS)
    soon = asyncio.create_task(b.attach(WEIGHTS, RO, seconds=0.01))
    later = asyncio.create_task(c.attach(WEIGHTS, RO, seconds=10.0))
    with pytest.raises(GmsError):
        await soon
    assert not later.done()
    await a.commit()
    assert (await later).mode is RO


async def test_a_process_on_a_new_connection_has_its_pages_again_and_the_old_one_is_forgotten(
    life: Life, a: Engine
) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv")
    for _ in range(5):
        before = a.client.id
        assert a.hang_up()
        a.connect(life)
        granted = await a.attach("kv", epoch=1)
        assert not granted.fresh
        assert not life.service.leave(before, proof=False)
    assert life.service.status().clients == 1
    assert len(life.service._ledger._leases) == 1
    a.die()
    assert life.state("kv") == "COMMITTED"


async def test_nothing_of_a_process_is_kept_whichever_of_its_connections_is_gone_last(life: Life, a: Engine) -> None:
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS)
    first = a.client.id
    assert a.hang_up()
    a.connect(life)
    await a.attach(WEIGHTS)
    a.die()
    assert life.state(WEIGHTS) == "EMPTY"
    assert not life.service.leave(first, proof=True)
    assert life.service.status().clients == 0
    assert life.service._ledger._leases == {}


async def test_what_a_deadline_decides_is_written_down_at_once(
    life: Life, a: Engine, b: Engine, tmp_path: Path
) -> None:
    await a.attach("kv", epoch=1)
    await a.allocate("kv")
    await b.attach("kv", epoch=2, seconds=0.01)
    (found,) = Journal(tmp_path / "state").load()
    assert (found.generation, found.lease_epoch, found.fence) == (2, 2, 2)


async def test_a_process_without_one_of_its_ranks_proves_nothing(life: Life, b: Engine) -> None:
    whole = Engine(life, "a", ranks=1)
    await whole.attach("kv", epoch=1)
    await whole.allocate("kv")
    assert whole.hang_up()
    first = whole.client.id
    whole.processes = frozenset(list(whole.processes)[:1])
    whole.connect(life)
    with pytest.raises(GmsError) as caught:
        await whole.attach("kv", epoch=1)
    assert code(caught) == ErrorCode.STALE_EPOCH
    whole.die()
    waiting = asyncio.create_task(b.attach("kv", epoch=2))
    await turns()
    assert not waiting.done()
    assert not life.service.leave(first, proof=True)
    assert not (await waiting).fresh


# --- commit


async def test_a_refused_commit_can_be_repeated(life: Life, a: Engine, b: Engine) -> None:
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS)
    life.backend.fail("freeze", StillMappedError())
    with pytest.raises(GmsError) as caught:
        await a.commit(manifest=b"m")
    assert code(caught) == ErrorCode.STILL_MAPPED
    assert life.state(WEIGHTS) == "WRITING"
    granted = await a.commit(manifest=b"m")
    assert (granted.mode, granted.manifest) == (RO, b"")
    assert (await b.attach(WEIGHTS, RO)).manifest == b"m"


@pytest.mark.parametrize("call", ["freeze", "digest"])
async def test_a_writer_that_dies_during_its_commit_leaves_the_committed_one_alone(
    life: Life, a: Engine, b: Engine, call: str
) -> None:
    await a.load()
    await b.attach(WEIGHTS)
    await b.allocate(WEIGHTS, size=4 * CHUNK)
    held = life.backend.hold(call)
    committing = asyncio.create_task(b.commit())
    await held.reached()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    b.die()
    held.release()
    await life.settle()
    assert life.service.status().total_bytes == 2 * CHUNK
    assert (await b_reads(life)).generation == 1


async def b_reads(life: Life) -> protocol.Granted:
    reader = Engine(life, "reader")
    granted = await reader.read()
    reader.die()
    return granted


async def test_the_first_of_many_writes_and_the_others_read(life: Life, a: Engine, b: Engine, c: Engine) -> None:
    assert (await a.attach(WEIGHTS, ANY)).mode is RW
    others = [asyncio.create_task(engine.attach(WEIGHTS, ANY)) for engine in (b, c)]
    await turns()
    await a.allocate(WEIGHTS)
    await a.commit(manifest=b"m")
    for granted in await asyncio.gather(*others):
        assert (granted.mode, granted.manifest, granted.fresh) == (RO, b"m", False)


async def test_a_broken_device_ends_requests_and_is_told(life: Life, a: Engine) -> None:
    await a.attach("kv")
    life.backend.fail("create", DeviceError("cuMemCreate failed: 999."))
    with pytest.raises(GmsError, match=r"cuMemCreate failed: 999\. The memory service ends") as caught:
        await a.allocate("kv")
    assert (code(caught), caught.value.retryable) == (ErrorCode.INTERNAL, False)
    assert [str(error) for error in life.failures] == ["cuMemCreate failed: 999."]


# --- what is told


async def test_the_status_of_a_busy_service(life: Life, a: Engine, b: Engine) -> None:
    await a.load()
    await b.attach("kv", epoch=3)
    await b.allocate("kv", "pages", CHUNK)
    status = life.service.status()
    assert (status.device, status.device_id, status.clients, status.journal) == ("cpu:0", "cpu:0", 2, "")
    assert (status.total_bytes, status.high_water_bytes, status.memory_limit) == (3 * CHUNK, 3 * CHUNK, LIMIT)
    assert status.bytes_by_owner == {"engine a": 2 * CHUNK, "engine b": CHUNK}
    assert {pool.name: (pool.state, pool.bytes, pool.epoch) for pool in status.pools} == {
        WEIGHTS: ("READ", 2 * CHUNK, 0),
        "kv": ("WRITING", CHUNK, 3),
    }


async def test_events_tell_the_story(life: Life, a: Engine) -> None:
    following = asyncio.create_task(life.service.get_events(protocol.GetEvents(after=0, timeout_seconds=10.0)))
    await turns()
    assert not following.done()
    await a.load()
    assert [event.kind for event in (await following).events] == ["granted"]
    reply = await life.service.get_events(protocol.GetEvents(after=1))
    assert [event.kind for event in reply.events] == ["committed"]
    assert reply.last == 2
    none = await life.service.get_events(protocol.GetEvents(after=2))
    assert (none.events, none.last) == ([], 2)


async def test_a_service_without_a_journal_takes_nothing_back_and_gives_no_lock() -> None:
    life = Life()
    engine = Engine(life, "a")
    await engine.attach("kv", epoch=1)
    await engine.allocate("kv")
    assert engine.locks == []
    with pytest.raises(GmsError, match="keeps no journal") as caught:
        await engine.hand_back("kv")
    assert code(caught) == ErrorCode.MISMATCH
    assert life.service.status().journal == "this service keeps no journal"
    engine.close()
    life.end()


# --- verification on attach


async def test_a_reader_may_have_its_pages_checked_first(life: Life, a: Engine, b: Engine) -> None:
    await a.load()
    granted = await b.attach(WEIGHTS, RO, verify=True)
    assert granted.mode is RO
    assert ("hashed", 2 * CHUNK) in life.seen.heard


async def test_a_reader_of_changed_pages_gets_no_lease_and_nobody_does_after_it(
    life: Life, a: Engine, b: Engine, c: Engine
) -> None:
    granted = await a.load(0, CHUNK)
    a.write(WEIGHTS, b"changed", offset=CHUNK)
    with pytest.raises(GmsError, match="the content of tensor 't64' is not what was committed") as caught:
        await b.attach(WEIGHTS, RO, verify=True)
    assert code(caught) == ErrorCode.CORRUPT
    assert "t64" in life.service.status().pools[0].corrupt
    assert [lease.engine for lease in life.service.status().pools[0].leases] == ["a"]
    with pytest.raises(GmsError) as caught:
        await c.attach(WEIGHTS, RO)
    assert code(caught) == ErrorCode.CORRUPT
    again = await c.attach(WEIGHTS, ANY)
    assert again.mode is RW
    assert again.generation > granted.generation


async def test_what_was_granted_is_checked_and_not_what_was_committed_meanwhile(
    life: Life, a: Engine, b: Engine, c: Engine
) -> None:
    await a.load(0)
    a.write(WEIGHTS, b"changed")
    await c.attach(WEIGHTS)
    await c.allocate(WEIGHTS, size=CHUNK)
    held = life.backend.hold("digest", 2)  # the first one is of the commit
    committing = asyncio.create_task(c.commit(manifest=manifest(0, size=CHUNK)))
    await turns()
    attaching = asyncio.create_task(b.attach(WEIGHTS, RO, verify=True))
    await held.reached()
    held.release()
    await committing
    with pytest.raises(GmsError) as caught:
        await attaching
    assert code(caught) == ErrorCode.CORRUPT
    assert life.service.status().pools[0].corrupt == ""
    assert life.service.get_manifest(protocol.GetManifest(pool=WEIGHTS)).generation == 2
