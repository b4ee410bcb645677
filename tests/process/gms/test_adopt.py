"""The service dies, its clients do not: what they hand back to the next one, and what the next one takes.

On the host the service hashes what comes back and knows the files by their inodes. Of a GPU's memory it sees neither
content nor size: it takes a chunk on the word of the client that had it, and what is wrong with it shows when the next
client hashes what it has mapped. Both is tested here, side by side.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gms import integrity, protocol
from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.protocol import MAX_FDS, Digests, ErrorCode
from tests.process.gms.bench import Agent, Bench, Device
from tests.process.gms.processes import until

pytestmark = pytest.mark.process

POOL = "weights/w"
WEIGHTS = "weights of a model"
KV = "pages of a cache"
LONG_SECONDS = "600"


def weights(bench: Bench, engine: str, *, units: int = 1) -> Agent:
    """Keeps them: the first one has written them."""
    agent = bench.agent(engine)
    agent.keep_weights(POOL, WEIGHTS, units=units, unit=bench.device.unit)
    return agent


def keep_kv(agent: Agent, epoch: int = 1, *, size_bytes: int = 1) -> None:
    """On a connection of its own, with something written into the pages."""
    agent.do("connect")
    assert agent.hold_kv(epoch, size_bytes=size_bytes)[1]
    agent.write_kv(KV)
    agent.do("keep", pool="kv")


def pair(bench: Bench, *, units: int = 1) -> tuple[Agent, Agent]:
    """An active engine and its shadow."""
    active, shadow = weights(bench, "a", units=units), weights(bench, "b")
    keep_kv(active)
    return active, shadow


def text(agent: Agent, *, at: int = 0) -> str:
    """Of the weights that an agent has mapped."""
    return str(agent.do("read", pool=POOL, tag="w", offset=at, length=len(WEIGHTS)))


def read_anew(bench: Bench, engine: str) -> Agent:
    """One that comes, and must find what is committed."""
    agent = bench.agent(engine)
    assert agent.do("attach", pool=POOL, mode="rw_or_ro", timeout_seconds=0)["mode"] == "ro"
    assert agent.read_weights(POOL, len(WEIGHTS)) == WEIGHTS
    return agent


def must_write(bench: Bench, engine: str, *, timeout_seconds: float = 10.0) -> Agent:
    """One that comes, and finds nothing."""
    agent = bench.agent(engine)
    assert agent.do("attach", pool=POOL, mode="rw_or_ro", timeout_seconds=timeout_seconds)["mode"] == "rw"
    return agent


@pytest.fixture(params=["one chunk", "many chunks"])
def in_chunks(device: Device, request: pytest.FixtureRequest) -> Iterator[tuple[Bench, int]]:
    """Of the weights' size in units; if it is many chunks, more than go into one message."""
    flags = ["--chunk-size", str(device.unit)] if request.param == "many chunks" else []
    with Bench(device, *flags) as made:
        yield made, MAX_FDS + 3 if flags else 1


def test_a_killed_service_gets_everything_back(in_chunks: tuple[Bench, int]) -> None:
    bench, units = in_chunks
    active, shadow = pair(bench, units=units)
    before = {agent.pid: bench.mapped_by(agent) for agent in (active, shadow)}
    kv = bench.pool("kv")
    assert kv is not None
    with bench.connect() as client:
        status = client.status()

    bench.service.kill()
    until(lambda: active.phase("kv") == shadow.phase(POOL) == "ADRIFT", "they have noticed")
    active.write_kv("meanwhile written")
    assert text(shadow) == WEIGHTS
    bench.start(*bench.flags)
    active.until_restored(POOL, "kv")
    shadow.until_restored(POOL)
    pools = {name: bench.pool(name) for name in (POOL, "kv")}
    assert {name: (pool.state, len(pool.leases)) for name, pool in pools.items() if pool is not None} == {
        POOL: ("READ", 2),
        "kv": ("WRITING", 1),
    }
    assert pools["kv"].generation == kv.generation  # type: ignore[union-attr]
    with bench.connect() as client:
        assert client.status().total_bytes == status.total_bytes
        assert client.get_manifest(POOL).manifest == b"manifest"
        (adopted,) = [event for event in client.events().events if (event.kind, event.pool) == ("adopted", POOL)]
        how = "checksums match" if bench.device.hashed else "its clients attest to its content"
        assert adopted.detail.endswith(how)
    assert {agent.pid: bench.mapped_by(agent) for agent in (active, shadow)} == before
    assert bench.held_by_service() == set.union(*before.values())
    if bench.gpus is not None:  # nor is there any other memory in use
        assert bench.in_use_on_gpu() == set.union(*before.values())

    active.kill()
    shadow.do("connect")
    lease, created = shadow.hold_kv(2)
    assert (lease["fresh"], created, shadow.kv(len(KV))) == (False, False, "meanwhile written"[: len(KV)])
    third = read_anew(bench, "c")
    assert text(third, at=units * bench.device.unit - len(WEIGHTS)) == WEIGHTS
    assert third.do("verify", pool=POOL) == shadow.do("verify_kept", pool=POOL) == units * bench.device.unit
    assert bench.mapped_by(third) == before[active.pid] & before[shadow.pid]


def test_again_and_again(bench: Bench) -> None:
    active, shadow = pair(bench)
    before = bench.mapped_by(active)
    for times in (1, 2, 3):
        bench.restart()
        active.until_restored(POOL, "kv", times=times)
        shadow.until_restored(POOL, times=times)
    assert bench.mapped_by(active) == bench.held_by_service() == before
    assert (text(shadow), active.kv(len(KV))) == (WEIGHTS, KV)


def test_the_service_and_the_active_engine_die_together(bench: Bench) -> None:
    """The shadow alone has the weights, and is slow; an engine that is started anew waits for it and does not load
    them. The cache is gone with who had it: nothing is waited for there."""
    active, shadow = pair(bench)
    shadow.process.signal(signal.SIGSTOP)
    active.kill()
    bench.restart("--adopt-timeout-seconds", LONG_SECONDS)
    again = bench.agent("a")
    lease, created = again.hold_kv(2, timeout_seconds=0)
    assert (lease["fresh"], created) == (True, True)
    assert again.kv(len(KV)) != KV
    again.ask("attach", pool=POOL, mode="rw_or_ro")
    waiting = bench.until_pool(POOL, lambda pool: pool.waiting == 1)
    assert waiting.state == "ADOPTING"
    assert "still being handed back" in waiting.waits[0]
    shadow.process.signal(signal.SIGCONT)
    assert again.answer()["mode"] == "ro"
    assert again.read_weights(POOL, len(WEIGHTS)) == WEIGHTS
    assert bench.mapped_by(shadow) < bench.mapped_by(again)


def test_the_service_dies_again_during_the_hand_back(device: Device) -> None:
    """What one of its clients had brought of it by then does not count twice, nor is it missed."""
    with Bench(device, "--chunk-size", str(device.unit), "--adopt-timeout-seconds", LONG_SECONDS) as bench:
        holder = weights(bench, "a", units=4)
        with bench.connect("b") as reader:
            lease = reader.attach(POOL, LeaseMode.RO)
            with lease.export("w") as pages:
                holder.process.signal(signal.SIGSTOP)
                bench.restart()
                with bench.connect("b") as client:
                    hand_back_half(client, pages, POOL, lease.generation)
                    assert bench.pool(POOL).state == "ADOPTING"  # type: ignore[union-attr]
                    bench.restart()
                    assert bench.held_by_service() == set()
        holder.process.signal(signal.SIGCONT)
        holder.until_restored(POOL)
        assert read_anew(bench, "c").do("verify", pool=POOL) == 4 * device.unit


def hand_back_half(client: GmsClient, pages: Allocation, pool: str, generation: int) -> None:
    """The first of two messages."""
    fds = [chunk.fd for chunk in pages.chunks[: len(pages.chunks) // 2]]
    part = protocol.Part(pages.tag, 0, len(fds))
    message = protocol.Adopt(pool=pool, generation=generation, mode=LeaseMode.RO, parts=[part], more=True, fds=len(fds))
    client._connection.call(message, protocol.Done, fds=fds)


def test_pages_that_nobody_hands_back_are_given_up(bench: Bench) -> None:
    """The holder lives but is stuck: what others need is not held up for ever, and what it has is its own then."""
    stuck = weights(bench, "a")
    keep_kv(stuck)
    stuck.process.signal(signal.SIGSTOP)
    bench.restart("--adopt-timeout-seconds", "0.1")
    comer = must_write(bench, "b")
    assert comer.hold_kv(2)[1]
    stuck.process.signal(signal.SIGCONT)
    until(lambda: stuck.phase(POOL) == "PRIVATE", "its weights are refused")
    reason = stuck.do("custody", pool=POOL)["reason"]
    assert "stands there by now" in reason or "nobody handed all of it back" in reason
    until(lambda: stuck.phase("kv") == "LOST", "its epoch is over")
    assert text(stuck) == WEIGHTS
    assert bench.mapped_by(comer).isdisjoint(bench.mapped_by(stuck))


def test_a_pool_that_was_committed_anew_is_not_taken_back(bench: Bench) -> None:
    old, new = weights(bench, "a"), bench.agent("b")
    old.process.signal(signal.SIGSTOP)
    generation = bench.agent("c").write_weights(POOL, "newer")
    assert new.keep_weights(POOL, WEIGHTS)["generation"] == generation
    bench.restart()
    new.until_restored(POOL)
    old.process.signal(signal.SIGCONT)
    until(lambda: old.phase(POOL) == "PRIVATE", "it is refused")
    assert text(old) == WEIGHTS
    assert text(new).startswith("newer")


def test_a_connection_alone_that_breaks_is_mended(bench: Bench) -> None:
    """The service lives; its client's socket does not."""
    holder = weights(bench, "a")
    keep_kv(holder)
    before = bench.mapped_by(holder)
    for pool in (POOL, "kv"):
        holder.do("break_connection", pool=pool)
        holder.until_restored(pool)
    assert bench.mapped_by(holder) == bench.held_by_service() == before
    assert bench.pool("kv").orphaned_bytes == 0  # type: ignore[union-attr]


def test_a_quiesced_release_while_the_service_is_away_hands_the_pages_on(bench: Bench) -> None:
    old, new = bench.agent("a"), bench.agent("b", connect=False)
    keep_kv(old)
    bench.service.kill()
    until(lambda: old.phase("kv") == "ADRIFT", "it has noticed")
    old.ask("let_go", pool="kv", wait_seconds=10)
    bench.start()
    old.answer()
    new.do("connect")
    lease, created = new.hold_kv(2, timeout_seconds=0)
    assert (lease["fresh"], created, new.kv(len(KV))) == (False, False, KV)


def damage(bench: Bench, *copies: str) -> None:
    """Cuts the journal's files in two."""
    for copy in copies:
        found = list(Path(f"{bench.path}.state").glob(f"*.{copy}"))
        assert found
        for path in found:
            os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("copy", ["a", "b"])
def test_one_damaged_copy_of_the_journal_costs_nothing(bench: Bench, copy: str) -> None:
    holder = weights(bench, "a")
    keep_kv(holder)
    bench.service.kill()
    damage(bench, copy)
    bench.start()
    holder.until_restored(POOL, "kv")
    bench.restart()  # what was mended is whole again
    holder.until_restored(POOL, "kv", times=2)
    assert (text(read_anew(bench, "b")), holder.kv(len(KV))) == (WEIGHTS, KV)


def test_a_journal_that_is_gone_is_said_and_the_service_serves_on(bench: Bench) -> None:
    holder = weights(bench, "a")
    keep_kv(holder)
    bench.service.kill()
    damage(bench, "a", "b")
    bench.start()
    for pool in (POOL, "kv"):
        until(lambda pool=pool: holder.phase(pool) == "PRIVATE", f"{pool} is refused")  # type: ignore[misc]
        assert "journal was damaged" in holder.do("custody", pool=pool)["reason"]
    with bench.connect() as client:
        told = [event.detail for event in client.events().events if event.kind == "journal"]
        assert len(told) == 4
        assert all("cannot be used: its checksum does not match" in detail for detail in told)
    must_write(bench, "b")
    assert (text(holder), holder.kv(len(KV))) == (WEIGHTS, KV)


# A GPU's memory: what its clients attest to


def test_what_changed_while_the_service_was_away_is_not_seen_at_the_hand_back_but_by_who_looks(gpu: Device) -> None:
    """Whoever attaches without looking reads what was changed. Once found, it is given to nobody, by no service."""
    with Bench(gpu) as bench:
        holder = weights(bench, "a")
        bench.service.kill()
        holder.do("map", pool=POOL, tag="w", writable=True)  # as no engine of ours does
        holder.do("write", pool=POOL, tag="w", offset=1, text="!")
        bench.start()
        holder.until_restored(POOL)
        careless, careful = bench.agent("b"), bench.agent("c")
        for agent in (careless, careful):
            assert agent.do("attach", pool=POOL, mode="ro", timeout_seconds=0)["mode"] == "ro"
            assert agent.read_weights(POOL, len(WEIGHTS)) == f"{WEIGHTS[0]}!{WEIGHTS[2:]}"
        with pytest.raises(GmsError, match=f"the content of bytes 0 to {gpu.unit} of 'w' is not what") as caught:
            careful.do("verify", pool=POOL)
        assert caught.value.code == "corrupt"
        with pytest.raises(GmsError, match="Attach as rw_or_ro to write it anew"):
            bench.agent("d").do("attach", pool=POOL, mode="ro")
        bench.restart()
        until(lambda: holder.phase(POOL) != "ADRIFT", "the next service has answered")
        assert holder.phase(POOL) in ("PRIVATE", "LOST")
        must_write(bench, "e")


# What is handed back by hand: this process had it, and has it still


class Kept:
    """A service after a restart, and what it is to be given back: pools of weights, one for each test that ends with
    its pages taken back; and KV pages, which stay with this process."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        with ExitStack() as stack:
            self._stack = stack
            client = stack.enter_context(bench.connect())
            self.weights = [self._written(client, f"weights/{number}") for number in range(len(WRONG) + 2)]
            self.kv_lease = client.attach("kv", LeaseMode.RW, epoch=3)
            self.kv = stack.enter_context(self.kv_lease.allocate("pages", 4 * bench.device.unit))
            bench.restart("--adopt-timeout-seconds", LONG_SECONDS)
            self._stack = stack.pop_all()

    def _written(self, client: GmsClient, pool: str) -> tuple[Lease, Allocation]:
        lease = client.attach(pool, LeaseMode.RW)
        pages = self._stack.enter_context(lease.allocate("w", 1))
        lease.commit(b"", digests=made_up(lease) if not self.bench.device.hashed else None)
        return lease, pages

    def adopt_kv(self, client: GmsClient, pages: Allocation, *, epoch: int = 3) -> Lease:
        generation = self.kv_lease.generation
        return client.adopt("kv", generation=generation, mode=LeaseMode.RW, epoch=epoch, allocations=[pages])

    def state(self, pool: str) -> str:
        found = self.bench.pool(pool)
        assert found is not None
        return found.state

    def close(self) -> None:
        self._stack.close()


def adopt(client: GmsClient, lease: Lease, pages: Allocation, *, generation: int = 0) -> Lease:
    """Weights, as what they were."""
    generation = generation or lease.generation
    return client.adopt(lease.pool, generation=generation, mode=LeaseMode.RO, epoch=0, allocations=[pages])


def made_up(lease: Lease) -> Digests:
    """This process cannot read a GPU's memory: any digests do, as long as nobody looks."""
    return {
        info.tag: [b"made up"] * len(integrity.pieces(info.size_bytes, info.chunk_bytes, b"", info.tag))
        for info in lease.allocations
    }


@pytest.fixture(scope="module")
def kept(device: Device) -> Iterator[Kept]:
    with Bench(device, "--chunk-size", str(device.unit)) as bench:
        made = Kept(bench)
        yield made
        made.close()


def other_memory(size_bytes: int) -> int:
    fd = os.memfd_create("gms:w", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    return fd


def a_pipe(unit: int) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def a_file(unit: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(unit)
        return os.dup(file.fileno())


WRONG: dict[str, Callable[[int], int]] = {
    "another memfd, unsealed": other_memory,
    "another size": lambda unit: other_memory(2 * unit),
    "an empty one": lambda unit: other_memory(0),
    "a pipe": a_pipe,
    "a file": a_file,
    "a folder": lambda unit: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    "a socket": lambda unit: socket.socket(socket.AF_UNIX).detach(),
    "a device": lambda unit: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_pages_are_refused_and_the_right_ones_taken_after_them(kept: Kept, what: str) -> None:
    lease, pages = kept.weights[list(WRONG).index(what)]
    unit = kept.bench.device.unit
    with Allocation("w", unit, unit, [WRONG[what](unit)], created=False) as wrong, kept.bench.connect() as client:
        before = kept.bench.held_by_service()
        refused(lambda: adopt(client, lease, wrong), ErrorCode.MISMATCH)
        assert kept.state(lease.pool) == "ADOPTING"
        assert kept.bench.held_by_service() == before
        assert adopt(client, lease, pages).mode is LeaseMode.RO
        assert kept.state(lease.pool) == "READ"


def refused(call: Callable[[], object], code: ErrorCode) -> None:
    with pytest.raises(GmsError) as caught:
        call()
    assert caught.value.code == code, caught.value


def test_another_generation_is_not_the_journalled_one(kept: Kept) -> None:
    lease, pages = kept.weights[-2]
    with kept.bench.connect() as client:
        refused(lambda: adopt(client, lease, pages, generation=77), ErrorCode.MISMATCH)
        assert adopt(client, lease, pages).generation == lease.generation


def test_pages_of_another_pool(kept: Kept) -> None:
    """Those of a GPU cannot be told apart by the service: they are taken, until somebody hashes them."""
    lease, _ = kept.weights[-1]
    unit = kept.bench.device.unit
    fds = [os.dup(kept.kv.chunks[0].fd)]
    with Allocation("w", unit, unit, fds, created=False) as wrong, kept.bench.connect() as client:
        if kept.bench.device.hashed:
            refused(lambda: adopt(client, lease, wrong), ErrorCode.MISMATCH)
            assert kept.state(lease.pool) == "ADOPTING"
        else:
            taken = adopt(client, lease, wrong)
            assert kept.state(lease.pool) == "READ"
            refused(lambda: taken.verify(digests={"w": [b"what a reader of these finds"]}), ErrorCode.CORRUPT)
            assert kept.state(lease.pool) == "EMPTY"


@pytest.mark.parametrize("what", WRONG)
def test_wrong_kv_pages_are_refused(kept: Kept, what: str) -> None:
    unit = kept.bench.device.unit
    fds = [os.dup(chunk.fd) for chunk in kept.kv.chunks[:3]] + [WRONG[what](unit)]
    with Allocation("pages", 4 * unit, unit, fds, created=False) as wrong, kept.bench.connect() as client:
        refused(lambda: kept.adopt_kv(client, wrong), ErrorCode.MISMATCH)
        assert kept.state("kv") == "ADOPTING"


@pytest.mark.parametrize(("epoch", "code"), [(2, ErrorCode.FENCED), (4, ErrorCode.MISMATCH)])
def test_kv_pages_come_from_the_journalled_epoch_only(kept: Kept, epoch: int, code: ErrorCode) -> None:
    with kept.bench.connect() as client:
        refused(lambda: kept.adopt_kv(client, kept.kv, epoch=epoch), code)
        assert kept.state("kv") == "ADOPTING"


@pytest.mark.parametrize("tag", ["pages", "other"])
def test_half_of_the_kv_pages_is_not_enough(kept: Kept, tag: str) -> None:
    unit = kept.bench.device.unit
    fds = [os.dup(chunk.fd) for chunk in kept.kv.chunks[:2]]
    with Allocation(tag, 2 * unit, unit, fds, created=False) as half, kept.bench.connect() as client:
        refused(lambda: kept.adopt_kv(client, half), ErrorCode.MISMATCH)
        assert kept.state("kv") == "ADOPTING"


def test_after_all_that_the_right_kv_pages_are_taken(kept: Kept) -> None:
    with kept.bench.connect() as client:
        assert kept.adopt_kv(client, kept.kv).mode is LeaseMode.RW
        assert kept.state("kv") == "WRITING"
        inodes = {os.fstat(chunk.fd).st_ino for chunk in kept.kv.chunks}
        assert inodes <= kept.bench.held_by_service()
