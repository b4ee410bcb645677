from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gms.allocations import AllocationTable, Entry
from gms.arbiter import Arbiter
from gms.backends.base import Identity
from gms.events import EventLog
from gms.journal import Journal, PoolRecord
from gms.leases import Request
from gms.ledger import Ledger
from gms.protocol import LeaseMode

A, B = 1, 2
RW = LeaseMode.RW


class FullJournal(Journal):
    """A journal on a disk that is full as long as `full` names the pool, or a lease's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.full: set[str] = set()
        self.written: list[str] = []

    def save(self, record: PoolRecord) -> None:
        self._check(record.pool)
        super().save(record)

    def forget(self, pool: str, *, committing: bool = False) -> None:
        self._check(pool)
        super().forget(pool, committing=committing)

    def open_lease(self, pool: str, generation: int) -> tuple[int, Path]:
        self._check(pool)
        return super().open_lease(pool, generation)

    def _check(self, pool: str) -> None:
        if pool in self.full:
            raise OSError(28, f"No space left for {pool}")
        self.written.append(pool)


class Bench:
    def __init__(self, journal: Journal | None) -> None:
        self.arbiter = Arbiter()
        self.table: AllocationTable[str] = AllocationTable()
        self.events = EventLog()
        self.ledger = Ledger(
            journal, arbiter=self.arbiter, table=self.table, events=self.events, device_id="cpu:0", algorithm=""
        )

    def attach(self, client: int, pool: str, epoch: int = 0) -> None:
        self.arbiter.attach(Request(client, client, f"engine {client}", pool, RW, epoch, 9.0))

    def allocate(self, pool: str, generation: int, size: int = 100) -> Entry[str]:
        entry = Entry[str](pool, generation, "pages", size, 64, "engine a")
        self.table.reserve(entry)
        return entry

    def fill(self, entry: Entry[str], chunks: int) -> None:
        for index in range(chunks):
            entry.pages[index] = "page"
            entry.identities.append(Identity(entry.chunk_size(index), inode=index))

    def kinds(self) -> list[str]:
        return [event.detail.split(" (")[0] for event in self.events._events if event.kind == "journal"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def journal(folder: Path) -> FullJournal:
    return FullJournal(folder)


@pytest.fixture
def bench(journal: Journal) -> Bench:
    return Bench(journal)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_held_pool_is_written_down_with_its_epochs_and_pages(bench: Bench, folder: Path) -> None:
    bench.attach(A, "kv", epoch=5)
    bench.attach(B, "kv", epoch=6)
    entry = bench.allocate("kv", 1)
    bench.fill(entry, 2)
    bench.table.put_manifest("kv", 1, b"m")
    bench.attach(A, "weights/a")
    bench.ledger.record("kv")
    (found,) = Journal(folder).load()
    assert (found.device_id, found.pool, found.generation, found.manifest) == ("cpu:0", "kv", 1, b"m")
    assert (found.fence, found.lease_epoch, found.highest_generation) == (6, 5, 2)
    (kept,) = found.allocations
    assert (kept.tag, kept.size_bytes, kept.chunk_bytes, kept.owner) == ("pages", 100, 64, "engine a")
    assert [(chunk.size_bytes, chunk.inode) for chunk in kept.identities] == [(64, 0), (36, 1)]


def test_what_is_still_being_filled_is_not_written_down(bench: Bench, folder: Path) -> None:
    bench.attach(A, "kv", epoch=5)
    entry = bench.allocate("kv", 1)
    bench.fill(entry, 1)
    bench.ledger.record("kv")
    assert Journal(folder).load()[0].allocations == []


def test_weights_are_written_down_once_committed_and_forgotten_when_they_are_gone(bench: Bench, folder: Path) -> None:
    bench.attach(A, "weights/a")
    bench.ledger.record("weights/a")
    assert Journal(folder).load() == []
    bench.arbiter.commit(A, "weights/a")
    bench.ledger.record("weights/a")
    assert [found.generation for found in Journal(folder).load()] == [1]
    bench.arbiter.condemn("weights/a", "changed")
    bench.ledger.record("weights/a")
    (found,) = Journal(folder).load()
    assert (found.generation, found.corrupt) == (1, "changed")  # those who read it must still be told
    bench.attach(B, "weights/a")
    bench.arbiter.commit(B, "weights/a")
    for client in (A, B):
        bench.arbiter.release(client, "weights/a", proof=True)
    bench.ledger.record("weights/a")
    (found,) = Journal(folder).load()
    assert (found.corrupt, found.condemned) == ("", {1: "changed"})  # who has it may still come with it


def test_a_fence_is_kept_without_pages(bench: Bench, folder: Path) -> None:
    bench.attach(A, "kv", epoch=5)
    bench.arbiter.release(A, "kv", proof=True)
    bench.ledger.record("kv")
    (found,) = Journal(folder).load()
    assert (found.generation, found.fence, found.allocations) == (1, 5, [])


def test_one_pools_success_does_not_hide_anothers_failure(bench: Bench, folder: Path, journal: FullJournal) -> None:
    bench.attach(A, "kv", epoch=1)
    bench.attach(A, "kv_index", epoch=1)
    journal.full = {"kv"}
    bench.ledger.record("kv")
    bench.ledger.record("kv_index")
    assert "No space left for kv" in bench.ledger.problem
    assert [found.pool for found in Journal(folder).load()] == ["kv_index"]
    assert bench.kinds() == ["The journal cannot be written"]


def test_what_could_not_be_written_is_written_as_soon_as_something_can(
    bench: Bench, folder: Path, journal: FullJournal
) -> None:
    bench.attach(A, "kv", epoch=1)
    bench.attach(A, "kv_index", epoch=1)
    journal.full = {"kv", "kv_index", "weights/gone"}
    for pool in ("kv", "kv_index", "weights/gone"):
        bench.ledger.record(pool)
    journal.full.clear()
    bench.ledger.record("kv_index")
    assert bench.ledger.problem == ""
    assert sorted(found.pool for found in Journal(folder).load()) == ["kv", "kv_index"]
    assert bench.kinds() == ["The journal cannot be written", "The journal can be written again."]


def test_a_lease_has_a_locked_descriptor_until_it_is_closed(bench: Bench, folder: Path, journal: FullJournal) -> None:
    (descriptor,) = bench.ledger.open_lease(A, "kv", 1, processes=1)
    assert journal.alive("kv", 1)
    os.close(descriptor)
    bench.ledger.close_lease(A, "kv")
    bench.ledger.close_lease(A, "kv")
    assert list(folder.glob("*.lease")) == []


def test_a_second_lease_of_a_client_takes_the_place_of_its_first(bench: Bench, folder: Path) -> None:
    (first,) = bench.ledger.open_lease(A, "kv", 1, processes=1)
    os.close(first)
    (second,) = bench.ledger.open_lease(A, "kv", 2, processes=1)
    (file,) = folder.glob("*.lease")
    assert file.name.split(".")[1] == "2"
    os.close(second)


def test_all_leases_of_a_client_end_with_it(bench: Bench, folder: Path, journal: FullJournal) -> None:
    fds = [*bench.ledger.open_lease(A, "kv", 1, processes=1), *bench.ledger.open_lease(A, "weights/a", 2, processes=1)]
    fds += bench.ledger.open_lease(B, "kv", 3, processes=1)
    journal.full = {"kv_index"}
    assert bench.ledger.open_lease(A, "kv_index", 4, processes=1) == []
    for fd in fds:
        os.close(fd)
    bench.ledger.close_leases(A)
    assert [path.name.split(".")[1] for path in folder.glob("*.lease")] == ["3"]
    assert bench.ledger.problem == ""


def test_a_lease_without_a_descriptor_is_a_problem_as_long_as_it_lasts(bench: Bench, journal: FullJournal) -> None:
    journal.full = {"kv"}
    assert bench.ledger.open_lease(A, "kv", 1, processes=1) == []
    assert "No space left for kv" in bench.ledger.problem
    bench.ledger.record("kv_index")
    assert bench.ledger.problem
    bench.ledger.close_lease(A, "kv")
    assert bench.ledger.problem == ""


def test_without_a_journal_nothing_is_kept_and_it_says_so() -> None:
    bench = Bench(None)
    bench.attach(A, "kv", epoch=1)
    bench.ledger.record("kv")
    assert bench.ledger.open_lease(A, "kv", 1, processes=1) == []
    bench.ledger.close_lease(A, "kv")
    bench.ledger.close_leases(A)
    bench.ledger.close()
    assert bench.ledger.problem == "this service keeps no journal"
    assert bench.kinds() == []


def test_what_could_not_be_written_is_tried_again_without_anything_happening(
    bench: Bench, folder: Path, journal: FullJournal
) -> None:
    journal.full = {"kv"}
    bench.attach(A, "kv", epoch=5)
    bench.ledger.record("kv")
    bench.ledger.check()
    assert bench.ledger.problem
    journal.full = set()
    bench.ledger.check()
    assert bench.ledger.problem == ""
    assert [found.pool for found in Journal(folder).load()] == ["kv"]


def test_a_folder_that_was_removed_is_written_anew_and_lost_locks_are_told(bench: Bench, folder: Path) -> None:
    bench.attach(A, "kv", epoch=5)
    bench.ledger.record("kv")
    (lock,) = bench.ledger.open_lease(A, "kv", 1, processes=1)
    shutil.rmtree(folder)
    bench.ledger.check()
    assert [found.pool for found in Journal(folder).load()] == ["kv"]
    assert "lease files were removed" in bench.ledger.problem
    assert bench.ledger.unlocked() == [(A, "kv")]
    os.close(lock)
    bench.ledger.close_lease(A, "kv")
    assert bench.ledger.problem == ""
    assert bench.ledger.unlocked() == []


def test_what_was_removed_from_the_folder_is_written_again(bench: Bench, folder: Path) -> None:
    bench.attach(A, "kv", epoch=5)
    bench.ledger.record("kv")
    (lock,) = bench.ledger.open_lease(A, "kv", 1, processes=1)
    for path in folder.iterdir():
        path.unlink()
    bench.ledger.check()
    assert [found.pool for found in Journal(folder).load()] == ["kv"]
    assert "lease files were removed" in bench.ledger.problem
    os.close(lock)
