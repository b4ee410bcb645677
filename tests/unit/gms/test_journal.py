from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gms import journal as journal_module
from gms.backends.base import Identity
from gms.journal import AllocationRecord, Journal, PoolRecord

ROOT = Path(__file__).parents[3]


def record(pool: str = "kv", generation: int = 3, **changed: object) -> PoolRecord:
    allocation = AllocationRecord(
        tag="pages",
        size_bytes=192,
        chunk_bytes=128,
        owner="engine a",
        identities=[Identity(128, 1, 17, 6), Identity(64, 1, 18, 6)],
        digests=[b"1234", b"5678"],
    )
    made = PoolRecord(
        device_id="cpu:0",
        pool=pool,
        generation=generation,
        highest_generation=9,
        fence=7,
        lease_epoch=6,
        manifest=b"\x00m",
        allocations=[allocation],
    )
    return msgspec.structs.replace(made, **changed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def journal(folder: Path) -> Journal:
    return Journal(folder)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def copies(folder: Path) -> tuple[Path, Path]:
    """The two files of the only record."""
    (a,), (b,) = folder.glob("*.a"), folder.glob("*.b")
    return a, b


def loaded(folder: Path) -> list[PoolRecord]:
    return Journal(folder).load()


# --- records


def test_what_is_saved_is_loaded(journal: Journal, folder: Path) -> None:
    records = [record(), record("weights/a", 4, fence=0), record("kv_index", 0, allocations=[], manifest=b"")]
    for made in records:
        journal.save(made)
    again = Journal(folder)
    assert sorted(again.load(), key=lambda r: r.generation) == sorted(records, key=lambda r: r.generation)
    assert again.damage == {}
    assert again.highest_generation == 9
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_newest_counts_and_what_is_equal_is_not_written(journal: Journal, folder: Path) -> None:
    journal.save(record())
    journal.save(record(fence=8))
    stamps = [path.stat().st_ino for path in copies(folder)]
    journal.save(record(fence=8))
    assert [path.stat().st_ino for path in copies(folder)] == stamps
    assert loaded(folder) == [record(fence=8)]


def test_what_is_forgotten_is_gone(journal: Journal, folder: Path) -> None:
    journal.save(record())
    journal.forget("kv")
    journal.forget("kv")
    journal.forget("weights/never")
    assert list(folder.iterdir()) == []
    journal.save(record())
    assert loaded(folder) == [record()]


def test_a_record_cut_short_anywhere_is_told_and_its_copy_used(journal: Journal, folder: Path) -> None:
    journal.save(record())
    a, b = copies(folder)
    whole = a.read_bytes()
    for length in range(len(whole)):
        a.write_bytes(whole[:length])
        again = Journal(folder)
        assert again.load() == [record()]
        assert list(again.damage) == [a.name]
    b.write_bytes(whole[:-1])
    again = Journal(folder)
    assert again.load() == []
    assert list(again.damage) == [a.name, b.name]
    assert "truncated or changed" in again.damage[a.name]


def test_a_byte_changed_anywhere_is_noticed(journal: Journal, folder: Path) -> None:
    journal.save(record())
    a, _ = copies(folder)
    whole = a.read_bytes()
    for index in range(len(whole)):
        a.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        again = Journal(folder)
        assert (again.load(), list(again.damage)) == ([record()], [a.name])


@pytest.mark.parametrize("missing", [0, 1])
def test_one_copy_is_enough_and_is_mended(journal: Journal, folder: Path, missing: int) -> None:
    journal.save(record())
    gone = copies(folder)[missing]
    gone.unlink()
    again = Journal(folder)
    assert again.load() == [record()]
    again.save(record())
    assert gone.exists()
    copies(folder)[1 - missing].unlink()
    assert loaded(folder) == [record()]


def test_copies_that_changed_places_do_no_harm(journal: Journal, folder: Path) -> None:
    journal.save(record())
    a, b = copies(folder)
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    assert loaded(folder) == [record()]


@pytest.mark.parametrize("older", [0, 1])
def test_of_two_copies_the_newer_counts_and_the_older_is_brought_up(journal: Journal, folder: Path, older: int) -> None:
    journal.save(record(fence=1))
    before = copies(folder)[older].read_bytes()
    journal.save(record(fence=2))
    copies(folder)[older].write_bytes(before)
    again = Journal(folder)
    assert again.load() == [record(fence=2)]
    again.save(record(fence=2))
    copies(folder)[1 - older].unlink()
    assert loaded(folder) == [record(fence=2)]


def test_numbers_go_on_so_that_what_is_saved_after_a_restart_is_newer(journal: Journal, folder: Path) -> None:
    for fence in range(1, 5):
        journal.save(record(fence=fence))
    kept = copies(folder)[0].read_bytes()
    again = Journal(folder)
    again.load()
    again.save(record(fence=5))
    copies(folder)[0].write_bytes(kept)
    assert loaded(folder) == [record(fence=5)]


def test_a_record_under_another_pools_name_is_not_believed(journal: Journal, folder: Path) -> None:
    journal.save(record())
    kv = copies(folder)[0]
    journal.save(record("kv_index"))
    (index,) = set(folder.glob("*.a")) - {kv}
    index.write_bytes(kv.read_bytes())
    again = Journal(folder)
    assert sorted(found.pool for found in again.load()) == ["kv", "kv_index"]
    assert "another pool's name" in again.damage[index.name]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([1, {"pool": "kv", "format": 9}], "another release wrote it"),
        ("text", "another release wrote it"),
        ([1, record(format=2)], "it has format 2, this release reads 1"),
    ],
)
def test_what_another_release_wrote_is_not_believed(
    journal: Journal, folder: Path, content: object, problem: str
) -> None:
    journal.save(record())
    body = msgspec.msgpack.encode(content)
    for path in copies(folder):
        path.write_bytes(hashlib.blake2b(body, digest_size=16).digest() + body)
    again = Journal(folder)
    assert again.load() == []
    assert all(problem in told for told in again.damage.values())
    assert len(again.damage) == 2
    again.save(record())
    assert loaded(folder) == [record()]


def test_what_is_no_file_is_told(journal: Journal, folder: Path) -> None:
    journal.save(record())
    a, _ = copies(folder)
    a.unlink()
    a.mkdir()
    again = Journal(folder)
    assert again.load() == [record()]
    assert "no file" in again.damage[a.name]


def test_half_written_files_are_cleared_away(journal: Journal, folder: Path) -> None:
    journal.save(record())
    (folder / "abc.a.new").write_bytes(b"half")
    assert loaded(folder) == [record()]
    assert len(list(folder.iterdir())) == 2


# --- a folder that fails


def test_a_write_that_fails_leaves_the_last_record_and_is_tried_again(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.save(record(fence=1))
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "open", refusing(28, "No space left on device"))
        with pytest.raises(OSError, match="No space"):
            journal.save(record(fence=2))
    assert loaded(folder) == [record(fence=1)]
    journal.save(record(fence=2))
    assert loaded(folder) == [record(fence=2)]


def test_a_write_that_fails_half_way_is_not_taken_for_the_state_before(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy is new, the second old: the newer one counts, so that the old state must be written again."""
    journal.save(record(fence=1))
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "open", refusing(28, "No space left on device", after=1))
        with pytest.raises(OSError, match="No space"):
            journal.save(record(fence=2))
    assert loaded(folder) == [record(fence=2)]
    journal.save(record(fence=1))
    assert loaded(folder) == [record(fence=1)]


def refusing(number: int, why: str, after: int = 0) -> object:
    calls = iter(range(100))
    real = os.open

    def call(path: Path, flags: int, mode: int = 0o777) -> int:
        if next(calls) >= after:
            raise OSError(number, why)
        return real(path, flags, mode)

    return call


def test_a_full_disk_stops_nothing_and_leaves_no_half_record(folder: Path) -> None:
    """A real one: the kernel refuses to write further than RLIMIT_FSIZE."""
    code = """
import resource, sys
from pathlib import Path
from gms.journal import Journal
from tests.unit.gms.test_journal import record
journal = Journal(Path(sys.argv[1]))
journal.save(record(fence=1))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    journal.save(record(fence=2))
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(list(Path(sys.argv[1]).iterdir())), Journal(Path(sys.argv[1])).load() == [record(fence=1)])
journal.save(record(fence=2))
print(Journal(Path(sys.argv[1])).load() == [record(fence=2)])
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["File too large", "2 True", "True"]


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(PermissionError, match="not this user's alone"):
        Journal(tmp_path)
    tmp_path.chmod(0o700)
    Journal(tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's folder")
def test_another_users_folder_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError):
        Journal(folder)


def test_the_folder_is_made_closed_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        Journal(folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


# --- leases


def test_a_lease_file_is_locked_as_long_as_its_descriptor_is_open(journal: Journal, folder: Path) -> None:
    descriptor, path = journal.open_lease("kv", 3)
    assert path.parent == folder
    assert not os.get_inheritable(descriptor)
    assert journal.alive("kv", 3)
    assert not journal.alive("kv", 4)
    assert not journal.alive("kv_index", 3)
    os.close(descriptor)
    assert not journal.alive("kv", 3)
    assert not path.exists()


def test_a_lease_lives_as_long_as_one_of_its_processes(journal: Journal) -> None:
    """Held by a child that forked from its owner; freed by SIGKILL, which no handler sees."""
    descriptor, path = journal.open_lease("kv", 3)
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        os.close(descriptor)
        assert journal.alive("kv", 3)
        journal.close_lease(path)
        assert path.exists()
        child.kill()
    finally:
        child.kill()
        child.communicate(timeout=10)
    assert not journal.alive("kv", 3)
    assert not path.exists()


def test_a_lease_that_is_given_back_while_its_client_lives_is_cleared_away_later(journal: Journal) -> None:
    one, kept = journal.open_lease("kv", 3)
    journal.close_lease(kept)
    other, _ = journal.open_lease("kv", 4)
    assert kept.exists()
    os.close(one)
    third, _ = journal.open_lease("kv", 4)
    assert not kept.exists()
    for descriptor in (other, third):
        os.close(descriptor)


def test_leases_of_an_earlier_life_are_swept_and_their_generations_known(journal: Journal, folder: Path) -> None:
    dead, _ = journal.open_lease("weights/a", 40)
    living, path = journal.open_lease("weights/a", 30)
    os.close(dead)
    again = Journal(folder)
    again.load()
    assert again.highest_generation == 30
    assert list(folder.glob("*.lease")) == [path]
    os.close(living)
    descriptor, other = again.open_lease("kv", 31)
    assert list(folder.glob("*.lease")) == [other]
    os.close(descriptor)


@pytest.mark.parametrize("name", ["x.lease", "x.y.z.lease", ".lease"])
def test_what_is_no_lease_of_ours_is_no_generation(journal: Journal, folder: Path, name: str) -> None:
    with open(folder / name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        again = Journal(folder)
        again.load()
        assert again.highest_generation == 0


def test_a_lease_that_cannot_be_looked_at_counts(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors: who gave the client up for that would load a second copy."""
    descriptor, path = journal.open_lease("kv", 3)
    os.close(descriptor)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "open", refusing(24, "Too many open files"))
        assert journal.alive("kv", 3)
        journal.close_lease(path)
        with pytest.raises(OSError, match="Too many"):
            journal.open_lease("kv", 4)
    assert not journal.alive("kv", 3)


def test_a_lock_that_cannot_be_had_leaves_no_file(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.fcntl, "flock", refuse)
        with pytest.raises(OSError, match="No locks"):
            journal.open_lease("kv", 3)
    assert list(folder.iterdir()) == []


# --- the end


def test_a_clean_end_leaves_nothing_if_nobody_lives(journal: Journal, folder: Path) -> None:
    descriptor, _ = journal.open_lease("kv", 3)
    journal.save(record())
    os.close(descriptor)
    journal.close()
    assert not folder.exists()


def test_a_clean_end_keeps_what_a_living_client_could_hand_back(journal: Journal, folder: Path) -> None:
    descriptor, _ = journal.open_lease("kv", 3)
    journal.save(record())
    journal.save(record("weights/a"))
    journal.close()
    assert sorted(path.suffix for path in folder.iterdir()) == [".a", ".b", ".lease"]
    assert loaded(folder) == [record()]
    os.close(descriptor)
    Journal(folder).close()
    assert not folder.exists()


def test_a_clean_end_keeps_the_fence_against_a_holder_that_lives_with_older_pages(
    journal: Journal, folder: Path
) -> None:
    descriptor, _ = journal.open_lease("kv", 2)
    journal.save(record(generation=3))
    journal.close()
    assert loaded(folder) == [record(generation=3)]
    os.close(descriptor)


def test_a_clean_end_takes_damaged_and_half_written_files_along(journal: Journal, folder: Path) -> None:
    journal.save(record())
    copies(folder)[0].write_bytes(b"")
    again = Journal(folder)
    again.load()
    (folder / "stray.1.aa.lease").touch()
    again.close()
    assert not folder.exists()


def test_a_folder_that_went_away_is_an_error_for_records_and_none_for_the_end(journal: Journal, folder: Path) -> None:
    journal.save(record())
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        journal.save(record(fence=9))
    with pytest.raises(FileNotFoundError):
        journal.open_lease("kv", 3)
    journal.forget("kv")
    assert not journal.alive("kv", 3)
    journal.close()


def test_what_would_hang_or_flood_the_start_is_not_read(journal: Journal, folder: Path) -> None:
    journal.save(record())
    os.mkfifo(folder / "f.a")
    (folder / "h.b").touch()
    os.truncate(folder / "h.b", 1 << 40)
    (folder / "l.a").symlink_to("/etc/passwd")
    again = Journal(folder)
    assert again.load() == [record()]
    assert set(again.damage) == {"f.a", "h.b", "l.a"}


def test_a_lease_of_no_generation_that_there_can_be_is_not_counted_on(journal: Journal, folder: Path) -> None:
    for name in ("k.4611686018427387904.x.lease", "k.99999999999999999999999.x.lease", "odd.lease"):
        with open(folder / name, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            again = Journal(folder)
            again.load()
            assert again.highest_generation == 0


def test_a_folder_that_was_removed_is_made_anew(journal: Journal, folder: Path) -> None:
    journal.save(record())
    shutil.rmtree(folder)
    assert not journal.intact
    journal.make_anew()
    assert journal.intact
    journal.save(record())
    assert loaded(folder) == [record()]
