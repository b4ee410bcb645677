"""The service dies, its clients do not: what they hand back to the next one, and what the next one takes."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gms import protocol
from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.mapping import Reservation
from gms.protocol import ErrorCode, PoolStatus
from tests.process.gms.conftest import Process

pytestmark = pytest.mark.process

POOL = "weights/w"
SIZE = 1 << 20
WEIGHTS = b"weights of a model"
KV = b"pages of a cache"

HOLDER = f"""
from gms.custody import Custody
import threading
HELD = {{}}
def keep(client, lease, pages, writable):
    dial = lambda: connect(timeout_seconds=2, retry_seconds=0)
    HELD[lease.pool] = Custody(client, lease, [pages], dial=dial), mapped(pages, writable)
def weights():
    client = connect()
    lease = client.attach("{POOL}", LeaseMode.RW_OR_RO)
    mode = lease.mode
    if mode == "rw":
        pages = lease.allocate("w", {SIZE})
        with mapped(pages) as place:
            place.buffer()[:{len(WEIGHTS)}] = {WEIGHTS!r}
        lease.commit(b"manifest")
    else:
        pages = lease.export("w")
    keep(client, lease, pages, writable=False)
    say(mode, lease.generation)
def kv(epoch):
    client = connect()
    lease = client.attach("kv", LeaseMode.RW, epoch=epoch)
    pages = lease.allocate("kv", {SIZE})
    keep(client, lease, pages, writable=True)
    say("rw", lease.generation, pages.created)
def state(pool):
    held = HELD[pool][0].state()
    say(held.phase, held.restored, held.reason)
def write(text):
    HELD["kv"][1].buffer()[:len(text)] = text
    say("written")
def read(pool, length):
    say(bytes(HELD[pool][1].buffer()[:length]).decode())
for line in sys.stdin:
    exec(line)
"""


class Holder:
    """A client in a process of its own that keeps what it holds in custody."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def ask(self, call: str) -> str:
        self.process.tell(call)
        return self.process.line()

    def state(self, pool: str) -> tuple[str, int, str]:
        phase, restored, *reason = self.ask(f"state({pool!r})").split(" ", 2)
        return phase, int(restored), reason[0] if reason else ""

    def pages(self) -> set[tuple[str, str]]:
        """Name and inode of the service's pages that the process has mapped: the same ones are the same memory."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return set(re.findall(r"(\d+) +(/memfd:gms\S*) ", maps))

    def stop(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.signal(signal.SIGCONT)


class World:
    """A socket path where services come and go, and their clients."""

    def __init__(self, serve: Any, actor: Any, socket_path: Path, eventually: Any) -> None:
        self.path = socket_path
        self.state_folder = Path(f"{socket_path}.state")
        self.flags: tuple[str, ...] = ()
        self._serve = serve
        self._actor = actor
        self.eventually: Callable[[Callable[[], object], str], None] = eventually
        self.service: Process

    def start(self, *flags: str) -> Process:
        self.service = self._serve(*self.flags, *flags)
        return self.service

    def restart(self, *flags: str) -> None:
        self.service.kill()
        self.start(*flags)

    def holder(self) -> Holder:
        return Holder(self._actor(HOLDER))

    def connect(self, engine: str = "test") -> GmsClient:
        return GmsClient.connect(self.path, engine=engine, instance="test")

    def pool(self, name: str) -> PoolStatus | None:
        with self.connect("status") as client:
            return next((pool for pool in client.status().pools if pool.name == name), None)

    def until_pool(self, name: str, fits: Callable[[PoolStatus], object]) -> PoolStatus:
        found: list[PoolStatus] = []

        def look() -> bool:
            pool = self.pool(name)
            found[:] = [pool] if pool is not None else []
            return pool is not None and bool(fits(pool))

        self.eventually(look, f"{name} is as expected")
        return found[0]

    def until_restored(self, holder: Holder, pool: str, times: int = 1) -> None:
        self.eventually(lambda: holder.state(pool) == ("HELD", times, ""), f"{pool} was handed back")


@pytest.fixture
def world(serve: Any, actor: Any, socket_path: Path, eventually: Any) -> World:
    return World(serve, actor, socket_path, eventually)


@contextmanager
def content(allocation: Allocation, *, writable: bool) -> Iterator[bytes]:
    with allocation, Reservation(allocation.size_bytes) as place:
        place.map(allocation.chunks, writable=writable)
        yield bytes(place.buffer())


def kv_of(client: GmsClient, epoch: int) -> tuple[Lease, bytes, bool]:
    """The next epoch's lease, what the pages hold, and whether they are new."""
    lease = client.attach("kv", LeaseMode.RW, epoch=epoch)
    pages = lease.allocate("kv", SIZE)
    created = pages.created
    with content(pages, writable=True) as found:
        return lease, found, created


@pytest.mark.parametrize("flags", [(), ("--chunk-size", "4096")], ids=["one chunk", "256 chunks"])
def test_a_killed_service_gets_everything_back(world: World, flags: tuple[str, ...]) -> None:
    world.flags = flags
    world.start()
    a, b = world.holder(), world.holder()
    assert a.ask("weights()") == "rw 1"
    assert b.ask("weights()") == "ro 1"
    assert a.ask("kv(1)") == "rw 2 True"
    before = {holder: holder.pages() for holder in (a, b)}
    with world.connect() as client:
        status = client.status()

    world.service.kill()
    world.eventually(lambda: a.state("kv")[0] == b.state(POOL)[0] == "ADRIFT", "they have noticed")
    assert a.ask(f"write({KV!r})") == "written"
    assert b.ask(f"read({POOL!r}, {len(WEIGHTS)})") == WEIGHTS.decode()
    world.start()
    for holder, pool in ((a, POOL), (a, "kv"), (b, POOL)):
        world.until_restored(holder, pool)
    weights, kv = world.pool(POOL), world.pool("kv")
    assert weights is not None
    assert kv is not None
    assert (weights.state, weights.generation, len(weights.leases)) == ("READ", 1, 2)
    assert (kv.state, kv.generation, kv.epoch) == ("WRITING", 2, 1)
    with world.connect() as client:
        assert client.status().total_bytes == status.total_bytes
        assert client.get_manifest(POOL).manifest == b"manifest"
    assert {holder: holder.pages() for holder in (a, b)} == before

    a.process.kill()
    with world.connect() as client:
        lease, found, created = kv_of(client, epoch=2)
        assert found.startswith(KV)
        assert not created
        assert lease.generation == 2
        again = client.attach(POOL, LeaseMode.RW_OR_RO)
        assert (again.mode, again.generation) == (LeaseMode.RO, 1)
        with content(again.export("w"), writable=False) as found:
            assert found.startswith(WEIGHTS)


def test_the_service_and_the_active_engine_die_together(world: World) -> None:
    world.start()
    a, b = world.holder(), world.holder()
    assert a.ask("weights()") == "rw 1"
    assert b.ask("weights()") == "ro 1"
    assert a.ask("kv(1)") == "rw 2 True"
    b.stop()
    a.process.kill()
    world.service.kill()
    world.start()
    with world.connect() as client:
        _, found, created = kv_of(client, epoch=2)  # nobody has the old ones any more: nothing is waited for
        assert created
        assert found == bytes(SIZE)
        assert world.pool(POOL).state == "ADOPTING"  # type: ignore[union-attr]
        b.go_on()
        lease = client.attach(POOL, LeaseMode.RW_OR_RO)
        assert (lease.mode, lease.generation) == (LeaseMode.RO, 1)


def test_the_service_dies_again_during_the_hand_back(world: World) -> None:
    world.flags = ("--chunk-size", "4096")
    world.start()
    holder = world.holder()
    assert holder.ask("weights()") == "rw 1"
    with world.connect() as reader:
        pages = reader.attach(POOL, LeaseMode.RO).export("w")
        holder.stop()
        world.restart()
        with pages, world.connect() as client:
            half_of(client, pages)
            assert world.pool(POOL).state == "ADOPTING"  # type: ignore[union-attr]
            world.restart()
    holder.go_on()
    world.until_pool(POOL, lambda pool: pool.state == "READ")
    world.until_restored(holder, POOL)
    with world.connect() as client:
        lease = client.attach(POOL, LeaseMode.RW_OR_RO)
        assert (lease.mode, lease.generation) == (LeaseMode.RO, 1)
        with content(lease.export("w"), writable=False) as found:
            assert found.startswith(WEIGHTS)


def half_of(client: GmsClient, pages: Allocation) -> None:
    """The first of several hand-back messages, and no more."""
    part = protocol.Part(pages.tag, 0, 8)
    fds = [chunk.fd for chunk in pages.chunks[:8]]
    message = protocol.Adopt(pool=POOL, generation=1, mode=LeaseMode.RO, parts=[part], more=True, fds=8)
    client._connection.call(message, protocol.Done, fds=fds)


def test_again_and_again(world: World) -> None:
    world.start()
    a, b = world.holder(), world.holder()
    assert a.ask("weights()") == "rw 1"
    assert b.ask("weights()") == "ro 1"
    assert a.ask("kv(5)") == "rw 2 True"
    before = a.pages()
    for times in range(1, 6):
        world.restart()
        for holder, pool in ((a, POOL), (a, "kv"), (b, POOL)):
            world.until_restored(holder, pool, times)
    assert a.pages() == before


def test_an_engine_that_comes_meanwhile_waits_and_reads(world: World) -> None:
    world.start()
    holder = world.holder()
    assert holder.ask("weights()") == "rw 1"
    holder.stop()
    world.restart()
    comer = world.holder()
    comer.process.tell("weights()")
    waiting = world.until_pool(POOL, lambda pool: pool.waiting == 1)
    assert waiting.state == "ADOPTING"
    assert "still being handed back" in waiting.waits[0]
    holder.go_on()
    assert comer.process.line() == "ro 1"
    assert comer.pages() == holder.pages()


def test_pages_that_nobody_hands_back_are_given_up(world: World) -> None:
    """The holder lives but is stuck: what others need is not held up for ever, and what it has is its own then."""
    world.start()
    stuck = world.holder()
    assert stuck.ask("weights()") == "rw 1"
    assert stuck.ask("kv(1)") == "rw 2 True"
    stuck.stop()
    world.restart("--adopt-timeout-seconds", "0.1")
    comer = world.holder()
    assert comer.ask("weights()").startswith("rw ")
    assert comer.ask("kv(2)").startswith("rw ")
    stuck.go_on()
    world.eventually(lambda: stuck.state(POOL)[0] == "PRIVATE", "its weights are refused")
    assert "stands there by now" in stuck.state(POOL)[2] or "nobody handed all of it back" in stuck.state(POOL)[2]
    world.eventually(lambda: stuck.state("kv")[0] == "LOST", "its epoch is over")
    assert stuck.ask(f"read({POOL!r}, {len(WEIGHTS)})") == WEIGHTS.decode()
    assert comer.pages().isdisjoint(stuck.pages())


class Kept:
    """A reader of the weights that this process hands back by hand."""

    def __init__(self, world: World) -> None:
        world.start()
        with ExitStack() as stack:
            client = stack.enter_context(world.connect())
            lease = client.attach(POOL, LeaseMode.RW)
            self.pages = stack.enter_context(lease.allocate("w", SIZE))
            self.kv = stack.enter_context(client.attach("kv", LeaseMode.RW, epoch=3).allocate("kv", SIZE))
            lease.commit(b"manifest")
            self.generation = lease.generation
            world.restart()
            self.client = stack.enter_context(world.connect())
            self._stack = stack.pop_all()

    def adopt(self, pages: Allocation, *, pool: str = POOL, generation: int = 0, epoch: int = 0) -> Lease:
        mode = LeaseMode.RO if pool == POOL else LeaseMode.RW
        return self.client.adopt(
            pool, generation=generation or self.generation, mode=mode, epoch=epoch, allocations=[pages]
        )

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def kept(world: World) -> Iterator[Kept]:
    made = Kept(world)
    yield made
    made.close()


def other_memory(size_bytes: int = SIZE) -> int:
    fd = os.memfd_create("gms:w", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    return fd


def a_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


WRONG: dict[str, Callable[[], int]] = {
    "another memfd, unsealed": other_memory,
    "another size": lambda: other_memory(SIZE // 2),
    "an empty one": lambda: other_memory(0),
    "a pipe": a_pipe,
    "a file": a_file,
    "a folder": lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    "a socket": lambda: os.dup(socket.socket(socket.AF_UNIX).detach()),
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_pages_are_refused_and_the_right_ones_taken_after_them(kept: Kept, world: World, what: str) -> None:
    with Allocation("w", SIZE, SIZE, [WRONG[what]()], created=False) as wrong:
        for pool in (POOL, "kv"):
            with pytest.raises(GmsError) as refused:
                kept.adopt(wrong, pool=pool, generation=0 if pool == POOL else kv_generation(world), epoch=3)
            assert refused.value.code == ErrorCode.MISMATCH, refused.value
    assert kept.adopt(kept.pages).mode is LeaseMode.RO
    assert world.pool(POOL).state == "READ"  # type: ignore[union-attr]


def kv_generation(world: World) -> int:
    pool = world.pool("kv")
    assert pool is not None
    return pool.generation


def test_kv_pages_are_no_weights(kept: Kept) -> None:
    with Allocation("w", SIZE, SIZE, [os.dup(kept.kv.fd)], created=False) as wrong:
        with pytest.raises(GmsError) as refused:
            kept.adopt(wrong)
        assert refused.value.code == ErrorCode.MISMATCH


@pytest.mark.parametrize(("epoch", "code"), [(2, ErrorCode.FENCED), (4, ErrorCode.MISMATCH)])
def test_kv_pages_come_from_the_journalled_epoch_only(kept: Kept, world: World, epoch: int, code: ErrorCode) -> None:
    generation = kv_generation(world)
    with pytest.raises(GmsError) as refused:
        kept.adopt(kept.kv, pool="kv", generation=generation, epoch=epoch)
    assert refused.value.code == code, refused.value
    assert kept.adopt(kept.kv, pool="kv", generation=generation, epoch=3).mode is LeaseMode.RW


def test_another_generation_is_not_the_journalled_one(kept: Kept) -> None:
    with pytest.raises(GmsError) as refused:
        kept.adopt(kept.pages, generation=77)
    assert refused.value.code == ErrorCode.MISMATCH


@pytest.mark.parametrize("part", [protocol.Part("kv", 0, 8), protocol.Part("other", 0, 8)], ids=["half", "other"])
def test_half_of_the_kv_pages_is_not_enough(world: World, part: protocol.Part) -> None:
    world.flags = ("--chunk-size", str(SIZE // 16))
    kept = Kept(world)
    try:
        generation = kv_generation(world)
        fds = [chunk.fd for chunk in kept.kv.chunks[:8]]
        adopt = protocol.Adopt(pool="kv", generation=generation, mode=LeaseMode.RW, epoch=3, parts=[part], fds=8)
        with pytest.raises(GmsError) as refused:
            kept.client._connection.call(adopt, protocol.Granted, fds=fds, received=[])
        assert refused.value.code == ErrorCode.MISMATCH
        assert world.pool("kv").state == "ADOPTING"  # type: ignore[union-attr]
        assert kept.adopt(kept.kv, pool="kv", generation=generation, epoch=3).mode is LeaseMode.RW
    finally:
        kept.close()


def test_a_pool_that_was_committed_anew_is_not_taken_back(world: World) -> None:
    world.start()
    old, new = world.holder(), world.holder()
    assert old.ask("weights()") == "rw 1"
    old.stop()
    with world.connect() as client:
        lease = client.attach(POOL, LeaseMode.RW)
        with lease.allocate("w", SIZE):
            lease.commit(b"newer")
        assert new.ask("weights()") == f"ro {lease.generation}"
    world.restart()
    world.until_restored(new, POOL)
    old.go_on()
    world.eventually(lambda: old.state(POOL)[0] == "PRIVATE", "it is refused")
    assert old.ask(f"read({POOL!r}, {len(WEIGHTS)})") == WEIGHTS.decode()


def records(world: World, copy: str) -> list[Path]:
    found = sorted(world.state_folder.glob(f"*.{copy}"))
    assert found
    return found


@pytest.mark.parametrize("copy", ["a", "b"])
def test_one_damaged_copy_of_the_journal_costs_nothing(world: World, copy: str) -> None:
    world.start()
    holder = world.holder()
    assert holder.ask("weights()") == "rw 1"
    assert holder.ask("kv(1)") == "rw 2 True"
    world.service.kill()
    for path in records(world, copy):
        os.truncate(path, path.stat().st_size // 2)
    world.start()
    world.until_restored(holder, POOL)
    world.until_restored(holder, "kv")
    world.restart()  # what was mended is whole again
    world.until_restored(holder, POOL, 2)
    assert world.service.process.poll() is None


def test_a_journal_that_is_gone_is_said_and_the_service_serves_on(world: World) -> None:
    world.start()
    holder = world.holder()
    assert holder.ask("weights()") == "rw 1"
    assert holder.ask("kv(1)") == "rw 2 True"
    world.service.kill()
    for path in [*records(world, "a"), *records(world, "b")]:
        os.truncate(path, path.stat().st_size // 2)
    world.start()
    for pool in (POOL, "kv"):
        world.eventually(lambda pool=pool: holder.state(pool)[0] == "PRIVATE", f"{pool} is refused")
        assert "journal was damaged" in holder.state(pool)[2]
    comer = world.holder()
    assert comer.ask("weights()").startswith("rw ")
    assert holder.ask(f"read({POOL!r}, {len(WEIGHTS)})") == WEIGHTS.decode()


def test_a_connection_alone_that_breaks_is_mended(world: World) -> None:
    """The service lives; its client's socket does not."""
    world.start()
    holder = world.holder()
    assert holder.ask("weights()") == "rw 1"
    assert holder.ask("kv(1)") == "rw 2 True"
    for pool in (POOL, "kv"):
        holder.process.tell(f"HELD[{pool!r}][0]._client._connection._socket.shutdown(2)")
        world.until_restored(holder, pool)
    assert world.pool("kv").generation == 2  # type: ignore[union-attr]
    assert not world.pool("kv").orphaned_bytes  # type: ignore[union-attr]


def test_quiesced_release_while_the_service_is_away_hands_the_pages_on(world: World) -> None:
    world.start()
    holder = world.holder()
    assert holder.ask("kv(1)") == "rw 1 True"
    assert holder.ask(f"write({KV!r})") == "written"
    world.service.kill()
    world.eventually(lambda: holder.state("kv")[0] == "ADRIFT", "it has noticed")
    holder.process.tell("HELD['kv'][1].unmap(); HELD['kv'][0].release(quiesced=True, wait_seconds=10); say('released')")
    world.start()
    assert holder.process.line() == "released"
    started = time.monotonic()
    with world.connect() as client:
        _, found, created = kv_of(client, epoch=2)
    assert found.startswith(KV)
    assert not created
    assert time.monotonic() - started < 5
