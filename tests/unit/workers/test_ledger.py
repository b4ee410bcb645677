"""The file of numbers that outlive an engine: kills, forks, other owners, and whatever may lie at its path."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from workers.ledger import MOST_KEY_BYTES, SIZE, SLOTS, Ledger


def opened(path: Path, instance: str = "one") -> Ledger:
    return Ledger.open(path, instance=instance)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine-a.metrics"


def test_numbers_are_there_for_whoever_opens_it_next(path: Path) -> None:
    first = opened(path)
    first.add("x", 1.5)
    first.add("x", 1.0)
    first.put("y", 7.0)
    first.put("y", 6.0)
    second = opened(path)
    assert second.values() == {"x": 2.5, "y": 6.0}
    second.add("z", 1.0)
    assert first.values() == {"x": 2.5, "y": 6.0, "z": 1.0}
    first.add("z", 1.0)
    assert second.values()["z"] == 2.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.close()
    second.close()


def test_two_that_add_the_same_name_have_one_number(path: Path) -> None:
    first, second = opened(path), opened(path)
    first.add("x", 1.0)
    second.add("x", 1.0)
    second.add("y", 1.0)
    first.add("y", 1.0)
    assert first.values() == second.values() == {"x": 2.0, "y": 2.0}
    first.close()
    second.close()


def test_another_life_of_the_pod_begins_anew(path: Path) -> None:
    first = opened(path)
    first.add("x", 1.0)
    first.close()
    second = opened(path, "two")
    assert second.values() == {}
    second.add("y", 1.0)
    second.close()
    third = opened(path, "two")
    assert third.values() == {"y": 1.0}
    third.close()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * SIZE, bytes(SIZE), b"\0" * (SIZE + 1)])
def test_what_is_no_ledger_becomes_one(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    ledger = opened(path)
    assert ledger.values() == {}
    ledger.add("x", 1.0)
    assert opened(path).values() == {"x": 1.0}
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 >= SIZE, "a hole that a full disk cannot fill would be a SIGBUS"


def test_a_slot_that_cannot_be_read_is_not_of_ours(path: Path) -> None:
    ledger = opened(path)
    ledger.add("x", 1.0)
    ledger.close()
    with path.open("r+b") as file:
        file.seek(64 + 2)
        file.write(b"\xff")
    assert opened(path).values() == {}


def test_without_a_file_numbers_live_with_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "missing" / "file", link):
        ledger = opened(path)
        ledger.add("x", 1.0)
        assert ledger.values() == {"x": 1.0}
        assert "begin anew" in caplog.text
        caplog.clear()
    assert not (tmp_path / "elsewhere").exists()


def test_what_has_no_room_is_counted_all_the_same_and_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = opened(path)
    for _ in range(2):
        ledger.add("k" * (MOST_KEY_BYTES + 1), 1.0)
    assert caplog.text.count("no room") == 1
    for number in range(SLOTS):
        ledger.add(str(number), 1.0)
    ledger.add("one more", 2.0)
    ledger.put("one more", 3.0)
    assert ledger.values()["one more"] == 3.0
    assert len(ledger.values()) == SLOTS + 2
    assert len(opened(path).values()) == SLOTS


def test_a_fork_that_is_killed_loses_nothing_that_it_counted(path: Path) -> None:
    ledger = opened(path)
    ledger.add("x", 1.0)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            for _ in range(1000):
                ledger.add("x", 1.0)
            ledger.add("of the child", 1.0)
            os.write(write, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert ledger.values() == {"x": 1001.0, "of the child": 1.0}
    ledger.add("of the child", 1.0)
    assert ledger.values()["of the child"] == 2.0
    ledger.close()
