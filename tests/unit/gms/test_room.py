"""Who makes room for whom, and what a refusal says about trying again: of the service as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gms.arbiter import MAX_POOLS, Arbiter
from gms.leases import Refuse
from gms.protocol import ErrorCode, GmsError, LeaseMode
from tests.unit.gms import pool_states
from tests.unit.gms.memory_backend import CHUNK, descriptors, turns
from tests.unit.gms.pool_states import ANY, KV, RO, RW, ask, leave, short
from tests.unit.gms.pool_states import WEIGHTS as W
from tests.unit.gms.service_bench import WEIGHTS, Engine, Life

UNITS = 4


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    before = descriptors()
    life = Life(tmp_path / "state", limit=UNITS * CHUNK)
    yield life
    life.end()
    assert descriptors() == before


@pytest.fixture
async def engines(life: Life) -> AsyncIterator[list[Engine]]:
    made = [Engine(life, name) for name in "abc"]
    yield made
    for engine in made:
        engine.close()


async def idle(life: Life, pool: str, units: int) -> None:
    """Weights that nobody uses."""
    engine = Engine(life, pool)
    await engine.attach(pool)
    await engine.allocate(pool, size=units * CHUNK)
    await engine.commit(pool)
    engine.die()
    assert life.state(pool) == "COMMITTED"


async def refused(engine: Engine, pool: str, units: int, *, seconds: float = 0.0, tag: str = "w") -> GmsError:
    with pytest.raises(GmsError) as caught:
        await engine.allocate(pool, tag=tag, size=units * CHUNK, seconds=seconds)
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY
    return caught.value


# --- what nobody uses


async def test_weights_are_not_given_up_in_vain(life: Life, engines: list[Engine]) -> None:
    a, b, _ = engines
    await idle(life, "weights/idle", 1)
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=2 * CHUNK)
    await b.attach("weights/new")
    assert not (await refused(b, "weights/new", 3)).retryable
    assert life.state("weights/idle") == "COMMITTED"
    await b.allocate("weights/new", size=2 * CHUNK)
    assert life.state("weights/idle") == "EMPTY"
    assert life.service.status().total_bytes == 4 * CHUNK


async def test_who_waits_gives_nothing_up_until_it_suffices(
    life: Life, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again and again, at the head of the line."""
    monkeypatch.setattr("gms.store.RETRY_SECONDS", 0.005)
    a, b, c = engines
    await idle(life, "weights/idle", 1)
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=2 * CHUNK)
    await b.attach("weights/new")
    await refused(b, "weights/new", 3, seconds=0.05)
    waiting = asyncio.create_task(b.allocate("weights/new", size=3 * CHUNK, seconds=10.0))
    await turns()
    assert life.state("weights/idle") == "COMMITTED"
    a.die()
    await c.attach("kv", epoch=2)
    await c.allocate("kv", size=CHUNK)  # another size: the pages before go
    await waiting
    assert life.state("weights/idle") == "EMPTY"


async def test_a_full_device_without_a_limit_takes_what_is_unused_only_if_that_may_do(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path / "state")
    try:
        life.backend.room = 3 * CHUNK
        await idle(life, "weights/idle", 1)
        engine = Engine(life, "a")
        await engine.attach("kv", epoch=1)
        error = await refused(engine, "kv", 5)
        assert error.retryable  # the device may be another's too, and that one lets go
        assert life.state("weights/idle") == "COMMITTED"
        await engine.allocate("kv", size=3 * CHUNK)
        assert life.state("weights/idle") == "EMPTY"
        engine.close()
    finally:
        life.end()


def full(*, idle: bool = True) -> Arbiter:
    """As many pools as there can be; the first one is committed, and unused if `idle`."""
    arbiter = Arbiter()
    for number in range(MAX_POOLS):
        arbiter.attach(ask(number, f"weights/{number}"))
    arbiter.commit(0, "weights/0")
    if idle:
        leave(arbiter, 0, proof=True)
    return arbiter


@pytest.mark.parametrize(("mode", "evicts"), [(RW, True), (ANY, True), (RO, False)])
def test_a_pool_gives_way_to_one_that_can_write_and_not_to_one_that_could_only_wait(
    mode: LeaseMode, evicts: bool
) -> None:
    arbiter = full()
    actions = arbiter.attach(ask(100, "weights/new", mode))
    if evicts:
        assert short(actions) == ["drop 1", f"100 gets rw {MAX_POOLS + 1}"]
    else:
        (refusal,) = actions
        assert isinstance(refusal, Refuse)
        assert (refusal.code, refusal.retryable) == (ErrorCode.TOO_MANY, True)
        assert arbiter.unused() == [("weights/0", 1)]


# --- what goes by itself


@pytest.mark.parametrize(
    ("build", "unused", "lasting"),
    [
        (pool_states.empty, [], set()),
        (pool_states.writing, [], {(W, 1)}),
        (pool_states.committed, [(W, 1)], set()),
        (pool_states.aborted, [], set()),
        (pool_states.adopting, [], set()),
        (pool_states.rewriting, [], {(W, 1), (W, 2)}),
        (pool_states.condemned_read, [], {(W, 1)}),
        (pool_states.kv_held, [], {(KV, 1)}),
        (pool_states.kv_kept, [], {(KV, 1)}),
        (pool_states.kv_unproved, [], set()),
        (pool_states.kv_awaited, [], {(KV, 1)}),
        (pool_states.kv_unproved_awaited, [], set()),
        (pool_states.kv_orphaned, [], {(KV, 2)}),
        (pool_states.kv_adopting, [], set()),
    ],
)
def test_what_lasts_and_what_is_unused(
    build: Callable[[], Arbiter], unused: list[tuple[str, int]], lasting: set[tuple[str, int]]
) -> None:
    arbiter = build()
    assert arbiter.unused() == unused
    assert arbiter.lasting() == lasting
    assert [(drop.pool, drop.generation) for drop in arbiter.evict()] == unused  # type: ignore[union-attr]


async def test_pages_of_an_orphan_are_worth_waiting_for(life: Life, engines: list[Engine]) -> None:
    """A takeover without proof, on a device with room for weights and one set of KV pages, and a little."""
    a, b, _ = engines
    await b.attach(WEIGHTS)
    await b.allocate(WEIGHTS, size=CHUNK)
    await b.commit()
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=2 * CHUNK)
    assert (await b.attach("kv", epoch=2, seconds=0.0)).fresh
    error = await refused(b, "kv", 2)
    assert error.retryable
    assert "Part of that will go by itself: try again" in str(error)
    waiting = asyncio.create_task(b.allocate("kv", size=2 * CHUNK, seconds=10.0))
    await turns()
    assert not waiting.done()
    a.die()
    assert (await waiting).created
    assert life.service.status().total_bytes == 3 * CHUNK


async def test_what_does_not_fit_beside_the_pages_of_the_living_is_not(life: Life, engines: list[Engine]) -> None:
    a, b, _ = engines
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=2 * CHUNK)
    await b.attach("kv", epoch=2, seconds=0.0)
    assert (await refused(b, "kv", 4)).retryable
    await b.attach(WEIGHTS)
    await b.allocate(WEIGHTS, size=CHUNK)
    assert (await refused(b, "kv", 3)).retryable
    assert not (await refused(b, "kv", 4)).retryable  # the own pages count as well
    a.die()
    await b.allocate("kv", size=3 * CHUNK)


async def test_pages_kept_for_the_next_holder_do_not_go_by_themselves(life: Life, engines: list[Engine]) -> None:
    a, b, _ = engines
    await a.attach("kv", epoch=1)
    await a.allocate("kv", size=3 * CHUNK)
    await b.attach(WEIGHTS)
    a.hang_up()
    assert (await refused(b, WEIGHTS, 2)).retryable  # whoever takes over may get other pages
    a.die()
    assert life.state("kv") == "COMMITTED"
    assert not (await refused(b, WEIGHTS, 2)).retryable


async def test_what_a_broken_writer_left_goes_with_its_process(life: Life, engines: list[Engine]) -> None:
    a, b, _ = engines
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=3 * CHUNK)
    await b.attach("kv", epoch=1)
    assert not (await refused(b, "kv", 2)).retryable
    a.hang_up()
    assert (await refused(b, "kv", 2)).retryable
    a.die()
    await b.allocate("kv", size=2 * CHUNK)


async def test_what_is_being_filled_may_fail(life: Life, engines: list[Engine]) -> None:
    a, b, _ = engines
    await a.attach(WEIGHTS)
    await b.attach("kv", epoch=1)
    held = life.backend.hold("populate")
    filling = asyncio.create_task(a.allocate(WEIGHTS, size=3 * CHUNK))
    await held.reached()
    assert (await refused(b, "kv", 2)).retryable
    held.release()
    await filling
    assert not (await refused(b, "kv", 2)).retryable


async def test_an_older_version_lasts_as_long_as_it_is_read(life: Life, engines: list[Engine]) -> None:
    a, b, c = engines
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=CHUNK)
    await a.commit()
    await b.attach(WEIGHTS, RO)
    a.release(WEIGHTS)
    await a.attach(WEIGHTS, RW)
    await a.allocate(WEIGHTS, size=CHUNK)
    await a.commit()
    await c.attach("kv", epoch=1)
    assert not (await refused(c, "kv", 3)).retryable
    b.die()
    await c.allocate("kv", size=3 * CHUNK)


async def test_too_few_files_for_so_many_chunks(tmp_path: Path) -> None:
    life = Life(tmp_path / "state", chunks=3)
    try:
        engine = Engine(life, "a")
        await engine.attach("kv", epoch=1)
        await engine.allocate("kv", "w", 2 * CHUNK)
        with pytest.raises(GmsError, match="since this service may not open more files") as caught:
            await engine.allocate("kv", "x", 2 * CHUNK)
        assert caught.value.code == ErrorCode.TOO_MANY
        await engine.allocate("kv", "x", CHUNK)
        engine.close()
    finally:
        life.end()
