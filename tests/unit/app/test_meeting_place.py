from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.processes.supervisor import meeting_place
from app.start_error import StartError


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hs-") as short:  # so are the names of sockets
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_it_is_private_and_goes(temporary: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with meeting_place() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_a_killed_one_left_is_removed_and_nothing_else(temporary: Path) -> None:
    with meeting_place() as living:
        (living / "0.sock").touch()
        left = temporary / "hotspare-processes-dead"
        left.mkdir()
        (left / "0.counters").write_text("x")
        others = [
            temporary / "hotspare-bench-x",
            temporary / "hotspare-processes-file",
            temporary / "hotspare-processes-link",
        ]
        others[0].mkdir()
        others[1].touch()
        others[2].symlink_to(others[0])
        with meeting_place() as second:
            assert sorted(temporary.iterdir()) == sorted([living, second, *others])
            assert (living / "0.sock").exists()


def test_a_name_that_is_too_long(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(StartError, match="too long"), meeting_place():
        pass
    assert list(long.iterdir()) == []
