"""Weights over a real service that is killed while they are committed: no byte is lost, and none is there twice."""

from __future__ import annotations

import fcntl
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gms.client import GmsError, LeaseMode, Status
from gms.custody_phases import Phase
from tests.support.processes import DEADLINE_SECONDS, MS, Process, running, until
from workers.memory import MemoryService
from workers.weights import WeightsMemory, pool_name

pytestmark = pytest.mark.process

SIZE = 256 << 20
"""Hashing it takes long enough to be killed in."""
HASHING = 40 * MS
"""About how long, or somewhat less."""
POOL = pool_name("layout")
LOOK = 0.2 * MS


class Services:
    """One life of the memory service after the other, on the same path."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        (folder / "pod").mkdir(mode=0o700)
        self.path = folder / "pod" / "gms.sock"
        self.journal = folder / "pod" / "gms.sock.state"
        self.link = MemoryService(
            socket=str(self.path), device="cpu:0", engine="a", instance="pod", timeout_seconds=30, connect_seconds=10
        )
        self._folder = folder
        self._stack = stack
        self._lives = 0

    def start(self) -> Process:
        self._lives += 1
        arguments = ["--socket", str(self.path)]
        return self._stack.enter_context(running(f"gms-{self._lives}", "gms", *arguments, log_dir=self._folder))

    def status(self) -> Status:
        with self.link.connect() as client:
            return client.status()

    def noted(self) -> bool:
        """Whether the journal has the weights, as what is about to be committed or as what is."""
        return any(self.journal.glob("*.b"))

    def committed(self) -> bool:
        return any(not path.stem.endswith("-c") for path in self.journal.glob("*.b"))


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(tmp_path, stack)


class Commit(threading.Thread):
    """A commit under way."""

    def __init__(self, weights: WeightsMemory) -> None:
        super().__init__(daemon=True)
        self._weights = weights
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._weights.commit(b"manifest")
        except Exception as error:
            self.problem = error

    def until(self, reached: Callable[[], object]) -> None:
        """That moment of it. Nothing announces it, and it is short: it is looked for without a pause."""
        while not reached():
            self.join(LOOK)
            assert self.is_alive() or reached(), f"it ended before that: {self.problem}"

    def done(self) -> None:
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive()
        if self.problem is not None:
            raise self.problem


@contextmanager
def writer(services: Services) -> Iterator[WeightsMemory]:
    weights = WeightsMemory(services.link, POOL)
    try:
        weights.attach()
        assert weights.role == "writer"
        fill(weights)
        yield weights
    finally:
        weights.close()


def fill(weights: WeightsMemory) -> None:
    place = weights.map_for_writing(SIZE)
    for at in range(0, SIZE, mmap.PAGESIZE):
        place.write(at, at.to_bytes(8, "little"))


def is_sound(weights: WeightsMemory) -> bool:
    place = weights.map_for_reading()
    return all(place.read(at, 8) == at.to_bytes(8, "little") for at in range(0, SIZE, mmap.PAGESIZE))


def file_of(weights: WeightsMemory) -> int:
    """The inode of the pages that are mapped."""
    assert weights._range is not None
    start = f"{weights._range.address:x}-"
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(start)]
    return int(line.split()[4])


def sealed(weights: WeightsMemory) -> bool:
    assert weights._pages is not None
    return bool(fcntl.fcntl(weights._pages.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


def check_one_copy(services: Services, weights: WeightsMemory) -> None:
    """It is committed, in custody, and what the next engine reads are the same pages."""
    assert (weights.manifest, is_sound(weights)) == (b"manifest", True)
    until(lambda: weights.custody()[0].phase is Phase.HELD, saying="it is in custody, and a service has it")
    reader = WeightsMemory(services.link, POOL)
    try:
        reader.attach()
        assert (reader.role, reader.manifest) == ("reader", b"manifest")
        assert is_sound(reader)
        assert file_of(reader) == file_of(weights)
        (pool,) = services.status().pools
        assert (pool.state, pool.bytes, services.status().total_bytes) == ("READ", SIZE, SIZE)
    finally:
        reader.close()
    with services.link.connect() as client:
        lease = client.attach(POOL, LeaseMode.RO, verify=True)
        assert lease.verify() == SIZE


MOMENTS: dict[str, Callable[[Services, WeightsMemory], object]] = {
    "noted": lambda services, _: services.noted(),
    "sealed": lambda _, weights: sealed(weights),
    "done": lambda services, _: services.committed(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_service_killed_in_a_commit_costs_nothing(services: Services, moment: str) -> None:
    gms = services.start()
    with writer(services) as weights:
        commit = Commit(weights)
        commit.until(lambda: MOMENTS[moment](services, weights))
        gms.end()
        services.start()
        commit.done()
        check_one_copy(services, weights)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_service_killed_while_it_hashes_costs_nothing(services: Services, share: float) -> None:
    """And so is the one after it, wherever the commit is then."""
    gms = services.start()
    with writer(services) as weights:
        commit = Commit(weights)
        commit.until(lambda: sealed(weights))
        commit.join(share * HASHING)
        gms.end()
        second = services.start()
        until(lambda: services.status().clients > 1, saying="the pages are on their way back")
        commit.join(share * HASHING)
        second.end()
        services.start()
        commit.done()
        check_one_copy(services, weights)


def test_the_next_engine_waits_for_what_is_being_committed(services: Services) -> None:
    """And does not become a second writer of it while it is on its way back."""
    gms = services.start()
    with writer(services) as weights:
        commit = Commit(weights)
        commit.until(services.noted)
        gms.end()
        services.start()
        other = WeightsMemory(services.link, POOL)
        try:
            other.attach()
            assert other.role == "reader"
            assert is_sound(other)
            commit.done()
            check_one_copy(services, weights)
        finally:
            other.close()


def test_what_a_service_never_heard_of_is_to_be_written_anew(services: Services) -> None:
    gms = services.start()
    with writer(services) as weights:
        gms.end()
        services.start()
        with pytest.raises(GmsError, match="write them anew") as caught:
            weights.commit(b"manifest")
        assert caught.value.code == "mismatch"
    assert services.status().total_bytes == 0
    with writer(services) as weights:
        weights.commit(b"manifest")
        check_one_copy(services, weights)


def test_a_reader_survives_a_service_that_dies_while_it_waits_for_the_writer(services: Services) -> None:
    gms = services.start()
    with writer(services) as weights:
        reader = WeightsMemory(services.link, POOL)
        attaching = threading.Thread(target=reader.attach)
        attaching.start()
        try:
            until(lambda: services.status().pools[0].waiting > 0, saying="it waits for the commit")
            commit = Commit(weights)
            commit.until(lambda: sealed(weights))
            gms.end()
            services.start()
            commit.done()
            attaching.join(DEADLINE_SECONDS)
            assert not attaching.is_alive()
            assert reader.role == "reader"
            assert is_sound(reader)
        finally:
            reader.interrupt()
            attaching.join(DEADLINE_SECONDS)
            reader.close()
        check_one_copy(services, weights)
