"""Services that end without a word, and engines that hand their pages back to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from gms import adoption, protocol
from gms.backends.base import DeviceError
from gms.journal import Journal
from gms.protocol import ErrorCode, GmsError, Part
from tests.unit.gms.memory_backend import CHUNK, descriptors, turns
from tests.unit.gms.service_bench import ANY, RO, RW, WEIGHTS, Engine, Life

SIZE = 2 * CHUNK


class World:
    """One life of a service after another over one folder, and the engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: list[Life] = []
        self.engines: list[Engine] = []

    def start(self, **how: object) -> Life:
        self.lives.append(Life(self.folder, **how))  # type: ignore[arg-type]
        return self.lives[-1]

    def engine(self, name: str = "a", **how: int) -> Engine:
        self.engines.append(Engine(self.lives[-1], name, **how))
        return self.engines[-1]

    def restart(self, *engines: Engine, **how: object) -> Life:
        """Kills the service; these engines connect to the next one."""
        self.lives[-1].kill()
        life = self.start(**how)
        for engine in engines:
            engine.connect(life)
        return life

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for life in self.lives:
            life.end()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(adoption, "LOOK_SECONDS", 0.005)
    before = descriptors()
    world = World(tmp_path / "state")
    yield world
    world.close()
    await turns()
    assert descriptors() == before


async def refused(attempt: object) -> GmsError:
    with pytest.raises(GmsError) as caught:
        await attempt  # type: ignore[misc]
    return caught.value


async def serving_weights(world: World, **how: object) -> tuple[Life, Engine, Engine]:
    """`a` wrote weights of two chunks, `b` reads them."""
    life = world.start(**how)
    a, b = world.engine("a"), world.engine("b")
    await a.load(0, 48, CHUNK)
    await b.read()
    return life, a, b


async def serving_kv(world: World, **how: object) -> tuple[Life, Engine]:
    """`a` holds kv with epoch 5: two chunks, and a manifest."""
    life = world.start(**how)
    a = world.engine("a")
    await a.attach("kv", epoch=5)
    await a.allocate("kv", size=SIZE)
    life.service.put_manifest(a.client, protocol.PutManifest(pool="kv", manifest=b"blocks"))
    return life, a


# --- weights


async def test_one_reader_hands_weights_back_and_nobody_writes_them_again(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    c = world.engine("c")
    attaching = asyncio.create_task(c.attach(WEIGHTS, ANY))
    await turns()
    assert (life.state(WEIGHTS), life.service.status().total_bytes) == ("ADOPTING", SIZE)
    assert "still being handed back" in life.service.status().pools[0].waits[0]
    granted = await b.hand_back(WEIGHTS)
    assert (granted.mode, granted.generation, granted.fresh) == (RO, 1, False)
    assert granted.manifest == a.life.service.get_manifest(protocol.GetManifest(pool=WEIGHTS)).manifest
    third = await attaching
    assert (third.mode, third.generation) == (RO, 1)
    c.export(WEIGHTS)
    assert c.digests(WEIGHTS, b"") == a.digests(WEIGHTS, b"")
    assert (await a.hand_back(WEIGHTS)).mode is RO
    assert life.backend.count("digest") == 3  # pieces, once
    assert life.backend.count("create") == 0
    await life.settle()
    assert len(life.backend.alive) == 2
    assert [lease.engine for lease in life.service.status().pools[0].leases] == ["c", "b", "a"]
    assert await life.said("adopted") == [f"{WEIGHTS}, generation 1: 128 bytes are taken back, checksums match"]


async def test_two_who_hand_back_at_once_share_one_hash(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    held = life.backend.hold("digest")
    handing = [asyncio.create_task(engine.hand_back(WEIGHTS)) for engine in (a, b)]
    await held.reached()
    await turns()
    assert life.state(WEIGHTS) == "ADOPTING"
    assert not any(task.done() for task in handing)
    held.release()
    assert [granted.generation for granted in await asyncio.gather(*handing)] == [1, 1]
    assert life.backend.count("digest") == 3
    assert [outcome[2] for outcome in life.seen.heard if outcome[0] == "handed_back"] == ["taken", "taken"]


async def test_one_that_goes_does_not_end_the_others_wait(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    held = life.backend.hold("digest")
    first, second = (asyncio.create_task(engine.hand_back(WEIGHTS)) for engine in (a, b))
    await held.reached()
    await turns()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    held.release()
    assert (await second).generation == 1


async def test_what_is_being_hashed_is_not_given_up_although_nobody_lives(world: World) -> None:
    _, a, b = await serving_weights(world)
    b.close()
    life = world.restart(a)
    held = life.backend.hold("digest")
    handing = asyncio.create_task(a.hand_back(WEIGHTS))
    await held.reached()
    handing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing
    a.die()
    adopter = life.service._adopter
    assert adopter is not None
    adopter._deadline -= 100
    adopter._look()
    assert life.state(WEIGHTS) == "ADOPTING"
    held.release()
    await life.until(WEIGHTS, "COMMITTED")


async def test_halves_from_two_readers_make_a_whole(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    first = asyncio.create_task(a.hand_back(WEIGHTS, parts=[Part("w", 0, 1)]))
    await life.settle()
    assert not first.done()
    second = await b.hand_back(WEIGHTS, parts=[Part("w", 1, 1)])
    assert (await first).generation == second.generation == 1
    assert life.state(WEIGHTS) == "READ"


async def test_pages_in_several_messages_are_one_hand_back(world: World) -> None:
    _, a, _ = await serving_weights(world)
    life = world.restart(a)
    await a.hand_back(WEIGHTS, parts=[Part("w", 1, 1)], more=True)
    assert life.service._arbiter.lease(a.client.id, WEIGHTS) is None
    await a.hand_back(WEIGHTS, parts=[Part("w", 0, 1)])
    assert life.state(WEIGHTS) == "READ"


async def test_who_brought_the_last_chunk_may_die_while_it_is_hashed(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    held = life.backend.hold("digest")
    handing = asyncio.create_task(a.hand_back(WEIGHTS))
    await held.reached()
    handing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing
    a.die()
    held.release()
    await life.until(WEIGHTS, "COMMITTED")
    assert (await b.hand_back(WEIGHTS)).generation == 1
    assert life.backend.count("digest") == 3


async def test_who_dies_while_its_chunks_are_looked_at_leaves_the_pool_to_others(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    held = life.backend.hold("adopt", 2)
    handing = asyncio.create_task(a.hand_back(WEIGHTS))
    await held.reached()
    handing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing
    a.die()
    held.release()
    await life.settle()
    assert len(life.backend.alive) == 1
    assert life.state(WEIGHTS) == "ADOPTING"
    await b.hand_back(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"


async def test_changed_pages_are_refused_by_the_name_of_their_tensor_to_all_who_bring_them(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    b.write(WEIGHTS, b"\xff", offset=48)
    c = world.engine("c")
    attaching = asyncio.create_task(c.attach(WEIGHTS, ANY))
    for error in await asyncio.gather(a.hand_back(WEIGHTS), b.hand_back(WEIGHTS), return_exceptions=True):
        assert isinstance(error, GmsError)
        assert error.code == ErrorCode.CORRUPT
        assert "the content of tensor 't48' is not what was committed" in str(error)
    granted = await attaching
    assert (granted.mode, granted.fresh) == (RW, True)
    assert granted.generation > 1
    await life.settle()
    assert life.backend.alive == []
    assert life.seen.heard.count(("handed_back", WEIGHTS, "refused")) == 2
    assert (await refused(a.hand_back(WEIGHTS))).code == ErrorCode.CORRUPT


async def test_nobody_hands_back_in_time(world: World) -> None:
    _, a, _ = await serving_weights(world)
    life = world.restart(a, adopt_seconds=0.05)
    c = world.engine("c")
    granted = await c.attach(WEIGHTS, ANY)
    assert (granted.mode, granted.fresh) == (RW, True)
    error = await refused(a.hand_back(WEIGHTS))
    assert error.code == ErrorCode.MISMATCH
    assert "nobody handed all of it back within 0.05 s" in str(error)
    assert "shares it with nobody any more" in str(error)
    assert len(await life.said("given_up")) == 1
    await c.allocate(WEIGHTS)
    await c.commit()
    assert (await refused(a.hand_back(WEIGHTS))).code == ErrorCode.MISMATCH


async def test_a_part_that_came_is_given_back_when_the_rest_does_not(world: World) -> None:
    _, a, _ = await serving_weights(world)
    life = world.restart(a, adopt_seconds=0.05)
    error = await refused(a.hand_back(WEIGHTS, parts=[Part("w", 0, 1)]))
    assert error.code == ErrorCode.MISMATCH
    await life.settle()
    assert (life.backend.alive, life.service.status().total_bytes) == ([], 0)


async def test_with_all_holders_dead_before_nothing_is_waited_for(world: World) -> None:
    _, a, b = await serving_weights(world)
    world.lives[-1].kill()
    a.close()
    b.close()
    life = world.start()
    assert life.state(WEIGHTS) == "EMPTY"
    assert life.service.status().total_bytes == 0
    c = world.engine("c")
    assert (await c.attach(WEIGHTS, ANY)).mode is RW
    assert len(Journal(world.folder).load()) == 0


async def test_with_the_last_holder_dead_meanwhile_nothing_is_waited_for_any_more(world: World) -> None:
    _, a, b = await serving_weights(world)
    a.close()
    world.restart()
    c = world.engine("c")
    attaching = asyncio.create_task(c.attach(WEIGHTS, ANY))
    await turns()
    assert not attaching.done()
    b.close()
    assert (await attaching).mode is RW
    assert "nobody who held it lives any more" in (await world.lives[-1].said("given_up"))[0]


async def test_a_service_may_be_killed_again_and_again(world: World) -> None:
    _, a, b = await serving_weights(world)
    for _ in range(3):
        life = world.restart(a, b)
        await b.hand_back(WEIGHTS)
    assert (life.state(WEIGHTS), life.backend.count("digest")) == ("READ", 3)
    life = world.restart(a, b)  # and while nothing has come back yet
    assert life.state(WEIGHTS) == "ADOPTING"
    life = world.restart(a, b)
    await a.hand_back(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"
    assert len(list(world.folder.glob("*.lease"))) <= len(a.locks) + len(b.locks)


async def test_a_clean_end_keeps_what_the_living_hold_and_the_next_life_takes_it_back(world: World) -> None:
    life, a, b = await serving_weights(world)
    life.end()
    life = world.start()
    for engine in (a, b):
        engine.connect(life)
        await engine.hand_back(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"


async def test_a_reader_whose_connection_broke_has_its_lease_again(world: World) -> None:
    life, a, b = await serving_weights(world)
    assert not b.hang_up()
    b.connect(life)
    assert (await b.hand_back(WEIGHTS)).generation == 1
    a.release(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"
    assert life.backend.count("digest") == 3  # those of the commit: what never left needs no hash


async def test_pages_over_the_limit_of_the_next_life_stay(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b, limit=CHUNK)
    await a.hand_back(WEIGHTS)
    assert life.service.status().total_bytes == SIZE
    await b.attach("kv", epoch=1)
    assert (await refused(b.allocate("kv"))).code == ErrorCode.OUT_OF_MEMORY


async def test_a_generation_that_was_being_written_keeps_its_number(world: World) -> None:
    """Its writer lives: nobody else's pages may be called by it."""
    world.start()
    a, c = world.engine("a"), world.engine("c")
    assert (await a.attach(WEIGHTS)).generation == 1
    await a.allocate(WEIGHTS)
    world.restart(a, c)
    granted = await c.attach(WEIGHTS)
    assert granted.generation == 2
    await c.allocate(WEIGHTS)
    await c.commit()
    error = await refused(a.hand_back(WEIGHTS, mode=RO))
    assert error.code == ErrorCode.MISMATCH
    assert "generation 2 stands there by now" in str(error)


async def test_weights_without_pages_cannot_be_handed_back_and_are_not_waited_for(world: World) -> None:
    world.start()
    a = world.engine("a")
    await a.attach(WEIGHTS)
    await a.commit()
    life = world.restart(a)
    assert life.state(WEIGHTS) == "EMPTY"


@pytest.mark.parametrize("readable", [True, False])
async def test_what_cannot_be_read_is_taken_back_on_the_clients_word(world: World, readable: bool) -> None:
    _, a, b = await serving_weights(world, readable=readable)
    life = world.restart(a, b, readable=readable)
    await b.hand_back(WEIGHTS)
    (told,) = await life.said("adopted")
    assert told.endswith("checksums match" if readable else "its clients attest to its content")
    assert life.backend.count("digest") == (3 if readable else 0)
    described = b.leases[WEIGHTS][0].manifest
    b.write(WEIGHTS, b"\xff")
    word = {} if readable else b.digests(WEIGHTS, described)
    verifying = life.service.verify(b.client, protocol.Verify(pool=WEIGHTS, digests=word))
    assert "'t0'" in str(await refused(verifying))


async def test_a_device_that_fails_while_it_is_hashed_lets_nobody_wait(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b)
    life.backend.fail("digest", DeviceError("it broke"))
    errors = await asyncio.gather(a.hand_back(WEIGHTS), b.hand_back(WEIGHTS), return_exceptions=True)
    assert [getattr(error, "code", error) for error in errors] == [ErrorCode.MISMATCH] * 2
    assert "could not be checked (it broke" in str(errors[0])
    assert len(life.failures) == 1


async def test_a_service_may_end_while_it_hashes(world: World) -> None:
    _, a, _ = await serving_weights(world)
    life = world.restart(a)
    held = life.backend.hold("digest")
    handing = asyncio.create_task(a.hand_back(WEIGHTS))
    await held.reached()
    handing.cancel()  # the server ends its sessions first
    with pytest.raises(asyncio.CancelledError):
        await handing
    life.end()
    await turns()
    life = world.start()
    a.connect(life)
    await a.hand_back(WEIGHTS)


# --- kv


async def test_the_holder_has_its_kv_pages_again_with_its_manifest(world: World) -> None:
    _, a = await serving_kv(world)
    a.write("kv", b"tokens")
    life = world.restart(a)
    assert life.state("kv") == "ADOPTING"
    granted = await a.hand_back("kv")
    assert (granted.mode, granted.generation, granted.fresh, granted.manifest) == (RW, 1, False, b"blocks")
    assert not (await a.allocate("kv", size=SIZE)).created
    a.die()
    b = world.engine("b")
    granted = await b.attach("kv", epoch=6)
    assert not granted.fresh
    assert not (await b.allocate("kv", size=SIZE)).created
    assert b.digests("kv", b"")["w"][0] != b.digests("kv", b"")["w"][1]
    assert life.backend.count("create") == 0


@pytest.mark.parametrize(
    ("epoch", "generation", "code"),
    [
        (4, 1, ErrorCode.FENCED),
        (6, 1, ErrorCode.MISMATCH),
        (5, 2, ErrorCode.FENCED),
        (4, 9, ErrorCode.FENCED),
        (6, 9, ErrorCode.MISMATCH),
    ],
)
async def test_kv_is_taken_from_its_holder_only(world: World, epoch: int, generation: int, code: str) -> None:
    _, a = await serving_kv(world)
    life = world.restart(a)
    assert (await refused(a.hand_back("kv", epoch=epoch, generation=generation))).code == code
    assert life.state("kv") == "ADOPTING"
    await a.hand_back("kv")
    assert life.state("kv") == "WRITING"


async def test_a_second_one_with_the_holders_epoch_is_fenced(world: World) -> None:
    _, a = await serving_kv(world)
    world.restart(a)
    twin = world.engine("twin")
    await a.hand_back("kv")
    twin.leases, twin.fds = dict(a.leases), a.fds
    error = await refused(twin.hand_back("kv"))
    twin.fds = {}
    assert error.code == ErrorCode.FENCED


async def test_a_newer_epoch_waits_for_the_hand_back_and_then_for_the_holders_end(world: World) -> None:
    _, a = await serving_kv(world)
    life = world.restart(a)
    b = world.engine("b")
    waiting = asyncio.create_task(b.attach("kv", epoch=6))
    await turns()
    await a.hand_back("kv")
    assert not waiting.done()
    assert "nothing proves yet" in life.service.status().pools[0].waits[0]
    a.die()
    granted = await waiting
    assert (granted.fresh, granted.manifest) == (False, b"blocks")


async def test_a_holder_that_comes_after_the_newer_epochs_patience_is_fenced(world: World) -> None:
    _, a = await serving_kv(world)
    life = world.restart(a)
    b = world.engine("b")
    granted = await b.attach("kv", epoch=6, seconds=0.01)
    assert granted.fresh
    assert (await refused(a.hand_back("kv"))).code == ErrorCode.FENCED
    assert (await refused(a.attach("kv", epoch=5))).code == ErrorCode.STALE_EPOCH
    assert life.service.status().total_bytes == 0


async def test_a_newer_epochs_patience_may_end_in_the_middle_of_a_hand_back(world: World) -> None:
    _, a = await serving_kv(world)
    life = world.restart(a)
    held = life.backend.hold("adopt", 2)
    handing = asyncio.create_task(a.hand_back("kv"))
    await held.reached()
    granted = await world.engine("b").attach("kv", epoch=6, seconds=0.0)
    assert granted.fresh
    held.release()
    assert (await refused(handing)).code == ErrorCode.FENCED
    await life.settle()
    assert life.backend.alive == []


async def test_pages_that_were_handed_back_are_their_holders_own(world: World) -> None:
    _, a = await serving_kv(world)
    world.restart(a)
    await a.hand_back("kv")
    assert (await refused(a.allocate("kv", size=CHUNK))).code == ErrorCode.SIZE_MISMATCH


async def test_the_fence_outlives_pages_and_holders(world: World) -> None:
    _, a = await serving_kv(world)
    world.lives[-1].kill()
    a.close()
    world.start()
    b = world.engine("b")
    assert (await refused(b.attach("kv", epoch=4))).code == ErrorCode.STALE_EPOCH
    granted = await b.attach("kv", epoch=5)
    assert (granted.fresh, granted.generation) == (True, 2)


async def test_the_epoch_that_waited_fences_too(world: World) -> None:
    _, a = await serving_kv(world)
    b = world.engine("b")
    waiting = asyncio.create_task(b.attach("kv", epoch=7))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    world.restart(a, b)
    assert (await refused(b.attach("kv", epoch=6))).code == ErrorCode.STALE_EPOCH
    await a.hand_back("kv")


async def test_kv_that_is_not_complete_is_not_taken_and_the_rest_may_follow(world: World) -> None:
    _, a = await serving_kv(world)
    life = world.restart(a)
    error = await refused(a.hand_back("kv", parts=[Part("w", 1, 1)]))
    assert error.code == ErrorCode.MISMATCH
    assert "'w' are missing or incomplete" in str(error)
    assert life.state("kv") == "ADOPTING"
    await a.hand_back("kv", parts=[Part("w", 0, 1)])
    assert life.state("kv") == "WRITING"


async def test_pages_that_were_never_filled_are_not_expected(world: World) -> None:
    life, a = await serving_kv(world)
    held = life.backend.hold("populate")
    filling = asyncio.create_task(a.allocate("kv", "more", CHUNK))
    await held.reached()
    life.service.put_manifest(a.client, protocol.PutManifest(pool="kv", manifest=b"later"))
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    world.restart(a)
    assert [info.tag for info in (await a.hand_back("kv")).allocations] == ["w"]


async def test_a_holder_without_pages_has_nothing_to_hand_back(world: World) -> None:
    world.start()
    a = world.engine("a")
    await a.attach("kv", epoch=5)
    life = world.restart(a)
    assert life.state("kv") == "EMPTY"
    assert (await a.attach("kv", epoch=5)).fresh


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_holder_whose_connection_broke_goes_on_with_its_pages(world: World, awaited: bool) -> None:
    life, a = await serving_kv(world)
    b = world.engine("b")
    waiting = asyncio.create_task(b.attach("kv", epoch=6)) if awaited else None
    await turns()
    first = a.client.id
    assert a.hang_up()
    a.connect(life)
    granted = await a.hand_back("kv")
    assert (granted.mode, granted.fresh, granted.generation) == (RW, False, 1)
    assert not life.service.leave(first, proof=False)
    assert life.state("kv") == "WRITING"
    await life.settle()
    assert len(life.backend.alive) == 2
    if waiting is not None:
        assert not waiting.done()
        a.die()
        assert not (await waiting).fresh


async def test_another_process_cannot_take_a_broken_connections_place(world: World) -> None:
    life, a = await serving_kv(world)
    thief = world.engine("thief")
    assert a.hang_up()
    thief.leases, thief.fds = dict(a.leases), a.fds
    error = await refused(thief.hand_back("kv"))
    thief.fds = {}
    assert error.code == ErrorCode.FENCED
    assert life.state("kv") == "WRITING"


async def test_a_holder_that_was_fenced_is_told_so_by_the_next_life_too(world: World) -> None:
    life, a = await serving_kv(world)
    b = world.engine("b")
    await b.attach("kv", epoch=6, seconds=0.0)
    await b.allocate("kv", size=CHUNK)
    life = world.restart(a, b)
    assert (await refused(a.hand_back("kv"))).code == ErrorCode.FENCED
    assert (await b.hand_back("kv")).generation == 2
    life.end()
    b.close()
    life = world.start()
    a.connect(life)
    assert (await refused(a.hand_back("kv"))).code == ErrorCode.FENCED


async def test_several_pools_come_back_each_for_itself(world: World) -> None:
    life, a, b = await serving_weights(world)
    await a.attach("kv", epoch=5)
    await a.allocate("kv", size=SIZE)
    await a.attach("kv_index", epoch=5)
    await a.allocate("kv_index", size=16)
    life = world.restart(a, b)
    await a.hand_back("kv_index")
    assert [life.state(pool) for pool in (WEIGHTS, "kv", "kv_index")] == ["ADOPTING", "ADOPTING", "WRITING"]
    await a.hand_back("kv")
    await a.hand_back(WEIGHTS)
    assert life.service.status().total_bytes == 2 * SIZE + 16
    assert life.service.status().bytes_by_owner == {"engine a": 2 * SIZE + 16}


# --- refusals


async def test_what_cannot_be_handed_back(world: World) -> None:
    _, a, b = await serving_weights(world)
    await a.attach("kv", epoch=5)
    await a.allocate("kv")
    life = world.restart(a, b)
    whole = [Part("w", 0, 2)]
    refusals = [
        (ErrorCode.MISMATCH, a.hand_back(WEIGHTS, mode=RW)),
        (ErrorCode.NOT_PERMITTED, a.hand_back(WEIGHTS, mode=ANY)),
        (ErrorCode.NOT_PERMITTED, a.hand_back("kv", mode=RO)),
        (ErrorCode.MISMATCH, a.hand_back(WEIGHTS, generation=2)),
        (ErrorCode.MISMATCH, a.hand_back(WEIGHTS, generation=0)),
        (ErrorCode.MISMATCH, a.hand_back(WEIGHTS, swapped=True)),
        (ErrorCode.MISMATCH, adopt(a, WEIGHTS, 1, [Part("other", 0, 2)])),
        (ErrorCode.MISMATCH, adopt(a, WEIGHTS, 1, [Part("w", 1, 2)])),
        (ErrorCode.MISMATCH, adopt(a, "weights/other", 1, whole)),
        (ErrorCode.BAD_FDS, adopt(a, WEIGHTS, 1, [Part("w", 0, 1)])),
        (ErrorCode.BAD_FDS, adopt(a, WEIGHTS, 1, [Part("w", 0, 3)])),
    ]
    for code, attempt in refusals:
        assert (await refused(attempt)).code == code
    assert [life.state(pool) for pool in (WEIGHTS, "kv")] == ["ADOPTING", "ADOPTING"]
    await a.hand_back(WEIGHTS)
    assert (await refused(a.hand_back(WEIGHTS))).code == ErrorCode.ALREADY_ATTACHED
    assert (await refused(adopt(b, "weights/other", 1, whole))).code == ErrorCode.MISMATCH
    assert life.state("weights/other") == "EMPTY"


async def adopt(engine: Engine, pool: str, generation: int, parts: list[Part]) -> object:
    """With the engine's two descriptors of its weights, whatever the parts say."""
    message = protocol.Adopt(pool=pool, generation=generation, mode=RO, parts=parts, fds=2)
    return await engine.life.service.adopt(engine.client, message, engine.fds[WEIGHTS, "w"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "gone"])
async def test_one_damaged_copy_of_the_journal_costs_nothing(world: World, damage: Callable[[Path], None]) -> None:
    _, a, _ = await serving_weights(world)
    world.lives[-1].kill()
    for path in world.folder.glob("*.a"):
        damage(path)
    life = world.start()
    a.connect(life)
    await a.hand_back(WEIGHTS)
    assert len(await life.said("journal")) == (damage is truncate)
    life = world.restart(a)
    await a.hand_back(WEIGHTS)
    assert await life.said("journal") == []


async def test_a_damaged_journal_is_named_as_the_reason(world: World) -> None:
    _, a, _ = await serving_weights(world)
    world.lives[-1].kill()
    for path in world.folder.glob("*.[ab]"):
        truncate(path)
    life = world.start()
    a.connect(life)
    error = await refused(a.hand_back(WEIGHTS))
    assert error.code == ErrorCode.MISMATCH
    assert "the journal was damaged" in str(error)
    assert len(await life.said("journal")) == 2
    granted = await a.attach(WEIGHTS, ANY)
    assert granted.mode is RW
    assert granted.generation > 1


async def test_another_devices_pages_are_not_taken_and_not_forgotten_while_their_holders_live(world: World) -> None:
    _, a, b = await serving_weights(world)
    world.lives[-1].kill()
    journal = Journal(world.folder)
    for record in journal.load():
        journal.save(msgspec.structs.replace(record, device_id="cpu:1"))
    with pytest.raises(GmsError, match="use another socket") as caught:
        world.start()
    assert caught.value.code == ErrorCode.WRONG_DEVICE
    a.close()
    b.close()
    life = world.start()
    assert life.state(WEIGHTS) == "EMPTY"


async def test_what_was_corrupt_is_still_so_for_a_next_service(world: World) -> None:
    life, a, b = await serving_weights(world)
    expelled: list[int] = []
    life.service.expel_with(expelled.append)
    b.write(WEIGHTS, b"\xff", offset=CHUNK)
    with pytest.raises(GmsError, match="is corrupt"):
        await life.service.verify(b.client, protocol.Verify(pool=WEIGHTS))
    assert sorted(expelled) == [a.client.id, b.client.id]
    life = world.restart(a, b)
    for reader in (a, b):
        error = await refused(reader.hand_back(WEIGHTS))
        assert (error.code, "'t64'" in str(error)) == (ErrorCode.CORRUPT, True)
    c = world.engine("c")
    assert (await refused(c.attach(WEIGHTS, RO))).code == ErrorCode.CORRUPT
    await c.load(0)  # what is wrong stays so for those who have it, however much is written after it
    assert (await refused(a.hand_back(WEIGHTS))).code == ErrorCode.CORRUPT
    world.restart(a, b, c)
    await c.hand_back(WEIGHTS)
    assert (await refused(b.hand_back(WEIGHTS))).code == ErrorCode.CORRUPT


@pytest.mark.parametrize("reached", ["freeze", "digest"])
async def test_a_writer_goes_on_with_a_commit_in_which_the_service_died(world: World, reached: str) -> None:
    life = world.start()
    a = world.engine("a")
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=SIZE)
    held = life.backend.hold(reached, 2 if reached == "freeze" else 1)
    committing = asyncio.create_task(a.commit(manifest=b"told"))
    await held.reached()
    files = {path.name: path.read_bytes() for path in world.folder.glob("*.[ab]")}
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    world.lives[-1].kill()
    for name, content in files.items():  # a SIGKILL tidies nothing up
        (world.folder / name).write_bytes(content)
    life = world.start()
    a.connect(life)
    b = world.engine("b")
    waiting = asyncio.create_task(b.attach(WEIGHTS, ANY))
    await turns()
    assert (life.state(WEIGHTS), waiting.done()) == ("ADOPTING", False)
    assert (await refused(a.hand_back(WEIGHTS, mode=RO))).code == ErrorCode.MISMATCH
    granted = await a.hand_back(WEIGHTS, mode=RW)
    assert (granted.mode, granted.generation, granted.fresh) == (RW, 1, False)
    assert (life.state(WEIGHTS), waiting.done()) == ("WRITING", False)
    await a.commit(manifest=b"told")
    assert ((await waiting).mode, (await waiting).manifest) == (RO, b"told")
    assert life.backend.count("create") == 0


async def test_a_writer_that_does_not_come_back_is_not_waited_for(world: World) -> None:
    life = world.start()
    a = world.engine("a")
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=SIZE)
    life.service._ledger.begin_commit(WEIGHTS, 1, b"")
    life = world.restart()
    b = world.engine("b")
    waiting = asyncio.create_task(b.attach(WEIGHTS, ANY))
    await turns()
    assert not waiting.done()
    a.close()
    assert ((await waiting).mode, (await waiting).generation) == (RW, 2)


async def test_a_commit_that_was_done_is_handed_back_as_a_readers(world: World) -> None:
    life = world.start()
    a = world.engine("a")
    await a.load(0)
    life.service._ledger.begin_commit(WEIGHTS, 1, b"")  # the service died before it could note the end
    life = world.restart(a)
    assert (await refused(a.hand_back(WEIGHTS, mode=RW))).code == ErrorCode.MISMATCH
    assert (await a.hand_back(WEIGHTS)).mode is RO
    assert life.state(WEIGHTS) == "READ"


async def test_kv_comes_back_with_all_its_holders_processes_or_not_at_all(world: World) -> None:
    life = world.start()
    a = world.engine("a", ranks=1)
    await a.attach("kv", epoch=5)
    await a.allocate("kv")
    life = world.restart(a)
    everyone, a.processes = a.processes, frozenset(list(a.processes)[:1])
    a.connect(life)
    error = await refused(a.hand_back("kv"))
    assert (error.code, "held by 2 processes, and 1 came back" in str(error)) == (ErrorCode.MISMATCH, True)
    a.processes = everyone
    a.connect(life)
    assert (await a.hand_back("kv")).generation == 1


async def test_what_an_earlier_holder_left_under_another_tag_goes_with_the_service(world: World) -> None:
    life, a = await serving_kv(world)
    a.die()
    b = world.engine("b")
    await b.attach("kv", epoch=6)
    await b.allocate("kv", tag="other")
    life = world.restart(b)
    assert (await b.hand_back("kv")).generation == 1
    status = life.service.status()
    assert ([info.tag for info in status.pools[0].allocations], status.total_bytes) == (["other"], CHUNK)


async def test_digests_of_another_algorithm_are_not_compared_but_made_anew(world: World) -> None:
    _, a, b = await serving_weights(world)
    life = world.restart(a, b, algorithm_name="another")
    await a.hand_back(WEIGHTS)
    await b.hand_back(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"
    b.write(WEIGHTS, b"\xff")
    with pytest.raises(GmsError, match="'t0'"):
        await life.service.verify(b.client, protocol.Verify(pool=WEIGHTS))


async def test_a_journal_that_cannot_be_written_is_told_and_stops_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = world.start()
    a = world.engine("a")

    def full(journal: Journal, *of: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", full)
        patch.setattr(Journal, "open_lease", full)
        await a.load(0)
        assert a.locks == []
        assert "No space left" in life.service.status().journal
    a.release(WEIGHTS)
    await a.read()
    assert life.service.status().journal == ""
    life = world.restart(a)
    await a.hand_back(WEIGHTS)
    assert life.state(WEIGHTS) == "READ"


async def test_a_rewrite_is_open_to_readers_though_an_old_one_does_not_come_back(world: World) -> None:
    """The writer of a second generation comes back from a restart, a reader of the first one hangs."""
    life, a, _ = await serving_weights(world)
    c = world.engine("c")
    await c.attach(WEIGHTS, RW)
    await c.allocate(WEIGHTS, size=SIZE)
    life.service._ledger.begin_commit(WEIGHTS, 2, b"")
    life = world.restart(c)
    await c.hand_back(WEIGHTS, mode=RW)
    a.connect(life)
    half = asyncio.create_task(a.hand_back(WEIGHTS, parts=[Part("w", 0, 1)]))  # it waits for the other chunk
    await life.settle()
    assert not half.done()
    await c.commit(manifest=b"second")
    d = world.engine("d")
    assert (await d.attach(WEIGHTS, ANY)).manifest == b"second"
    async with asyncio.timeout(10):
        assert (await refused(half)).code == ErrorCode.MISMATCH
