"""Whether committed memory is what was committed: by the service's own eyes, and on devices that it cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gms import protocol
from gms.journal import Journal
from gms.protocol import Digests, ErrorCode, GmsError
from tests.unit.gms.memory_backend import CHUNK, descriptors, turns
from tests.unit.gms.service_bench import RO, WEIGHTS, Engine, Life, manifest

SIZE = 2 * CHUNK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(params=[True, False], ids=["readable", "unreadable"])
async def life(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Life]:
    before = descriptors()
    life = Life(folder, readable=request.param)
    yield life
    life.end()
    assert descriptors() == before


unreadable = pytest.mark.parametrize("life", [False], indirect=True, ids=["unreadable"])
readable = pytest.mark.parametrize("life", [True], indirect=True, ids=["readable"])


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


async def verify(engine: Engine, word: Digests | None = None) -> protocol.Verified:
    """As a reader: on a device that the service cannot read, with digests of its own mapping."""
    if word is None:
        described = engine.leases[WEIGHTS][0].manifest or manifest(size=SIZE)
        word = {} if engine.life.backend.readable else engine.digests(WEIGHTS, described)
    return await engine.life.service.verify(engine.client, protocol.Verify(pool=WEIGHTS, digests=word))


async def refused(engine: Engine, word: Digests | None = None) -> GmsError:
    with pytest.raises(GmsError) as caught:
        await verify(engine, word)
    return caught.value


async def test_what_has_not_changed_is_verified(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0, 48, CHUNK)
    await b.read()
    for _ in range(2):
        assert await verify(b) == protocol.Verified(generation=1, size_bytes=SIZE)
    assert life.state(WEIGHTS) == "READ"


@pytest.mark.parametrize(
    ("at", "named"), [(0, "t0"), (47, "t32"), (48, "t48"), (63, "t48"), (CHUNK, "t64"), (127, "t64")]
)
async def test_a_changed_byte_is_called_by_its_tensor_and_withdraws_the_pool(
    life: Life, a: Engine, b: Engine, folder: Path, at: int, named: str
) -> None:
    await a.load(0, 32, 48, CHUNK)
    await b.read()
    b.write(WEIGHTS, b"\xff", offset=at)
    error = await refused(b)
    assert (error.code, error.retryable) == (ErrorCode.CORRUPT, False)
    assert f"the content of tensor '{named}' is not what was committed" in str(error)
    assert named in life.service.status().pools[0].corrupt
    (record,) = Journal(folder).load()
    assert named in record.corrupt  # a next service must not want it back
    assert "corrupt" in await life.kinds()


async def test_without_a_manifest_in_the_standard_form_it_is_called_by_its_place(
    life: Life, a: Engine, b: Engine
) -> None:
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=SIZE)
    await a.commit(WEIGHTS, b"something else", {} if life.backend.readable else a.digests(WEIGHTS, b""))
    await b.read()
    b.write(WEIGHTS, b"\xff", offset=CHUNK)
    assert "bytes 64 to 128 of 'w'" in str(await refused(b))


async def test_nothing_is_verified_where_nothing_is_committed(life: Life, a: Engine) -> None:
    wanted = ErrorCode.NOT_FOUND if life.backend.readable else ErrorCode.NOT_ATTACHED
    assert (await refused(a, {})).code == wanted
    await a.attach(WEIGHTS)
    assert (await refused(a, {})).code == wanted
    await a.attach("kv", epoch=1)
    with pytest.raises(GmsError):
        await life.service.verify(a.client, protocol.Verify(pool="kv"))


async def test_a_reader_of_older_pages_verifies_those_and_does_not_condemn_the_newer(
    life: Life, a: Engine, b: Engine
) -> None:
    await a.load(0)
    await b.read()
    old = b.digests(WEIGHTS, manifest(0, size=SIZE))
    await a.load_again(0)
    word = {} if life.backend.readable else old
    assert (await verify(b, word)).generation == 1
    b.write(WEIGHTS, b"\xff")
    word = {} if life.backend.readable else b.digests(WEIGHTS, manifest(0, size=SIZE))
    assert (await refused(b, word)).code == ErrorCode.CORRUPT
    assert life.service.status().pools[0].corrupt == ""
    assert life.service.get_manifest(protocol.GetManifest(pool=WEIGHTS)).generation == 2


@readable
async def test_anyone_may_ask_a_service_that_can_read(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0)
    assert (await verify(b, {})).generation == 1
    await b.attach(WEIGHTS)  # as the next writer, who is asked for nothing either
    assert (await verify(b, {})).generation == 1


@readable
async def test_two_who_find_the_same_fault_withdraw_once(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0)
    a.write(WEIGHTS, b"\xff")
    held = life.backend.hold("digest")
    asked = [asyncio.create_task(verify(engine, {})) for engine in (a, b)]
    await held.reached()
    await turns()
    held.release()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [getattr(error, "code", None) for error in found] == [ErrorCode.CORRUPT] * 2
    assert (await life.kinds()).count("corrupt") == 1


@readable
async def test_pages_that_go_while_they_are_verified(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0)
    held = life.backend.hold("digest")
    asked = asyncio.create_task(verify(b, {}))
    await held.reached()
    a.die()
    life.service._leasing.evict(1)
    held.release()
    with pytest.raises(GmsError) as caught:
        await asked
    assert caught.value.code == ErrorCode.NOT_FOUND


@readable
async def test_hashing_is_told_to_the_metrics_in_bytes(life: Life, a: Engine) -> None:
    await a.load(0)
    await verify(a, {})
    assert life.seen.heard.count(("hashed", SIZE)) == 2


# --- on a device that the service cannot read


@unreadable
@pytest.mark.parametrize(
    ("word", "came"),
    [({}, 0), ({"w": []}, 0), ({"w": [b"1234"]}, 1), ({"w": [b"1234"] * 4}, 4), ({"other": [b"1234"] * 3}, 0)],
    ids=["none", "empty", "few", "many", "another's"],
)
async def test_a_commit_without_the_writers_digests_is_refused_and_can_be_repeated(
    life: Life, a: Engine, word: Digests, came: int
) -> None:
    described = manifest(0, 48, size=SIZE)
    await a.attach(WEIGHTS)
    await a.allocate(WEIGHTS, size=SIZE)
    with pytest.raises(GmsError, match=f"3 digests of 'w' are due, {came} came") as caught:
        await a.commit(WEIGHTS, described, word)
    assert caught.value.code == ErrorCode.INVALID
    assert life.state(WEIGHTS) == "WRITING"
    await a.commit(WEIGHTS, described, a.digests(WEIGHTS, described))


@unreadable
async def test_only_readers_are_believed(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0)
    lie: Digests = {"w": [b"12345678"] * 2}
    assert (await refused(b, lie)).code == ErrorCode.NOT_ATTACHED
    await b.attach(WEIGHTS)
    assert (await refused(b, lie)).code == ErrorCode.NOT_ATTACHED
    assert life.service.status().pools[0].corrupt == ""


@unreadable
@pytest.mark.parametrize("word", [{}, {"w": []}, {"w": [b"12345678"]}, {"other": [b"12345678"] * 2}], ids=str)
async def test_a_reader_must_send_all_its_digests_and_a_missing_one_condemns_nothing(
    life: Life, a: Engine, b: Engine, word: Digests
) -> None:
    await a.load(0)
    await b.read()
    error = await refused(b, word)
    assert error.code == ErrorCode.INVALID
    assert "a reader must send its 2 digests of 'w'" in str(error)
    assert life.service.status().pools[0].corrupt == ""


@unreadable
async def test_pages_cannot_be_verified_on_attach(life: Life, a: Engine, b: Engine) -> None:
    await a.load(0)
    with pytest.raises(GmsError, match="cannot read its device") as caught:
        await b.attach(WEIGHTS, RO, verify=True)
    assert caught.value.code == ErrorCode.NOT_PERMITTED
    assert [lease.engine for lease in life.service.status().pools[0].leases] == ["a"]
    assert (await b.attach(WEIGHTS, RO)).mode is RO
