from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from workers.pod_files import EngineRecord, MemoryServiceRecord, PodFolder, PodFolderError, PodRecord

RECORD = PodRecord(
    pod="pod-0",
    instance="life-1",
    pid=7,
    host="127.0.0.1",
    serving_port=8100,
    gms=MemoryServiceRecord(pid=8, socket="/run/gms.sock", metrics_port=8109),
    engines={
        "a": EngineRecord(pid=9, admin_port=8101, restarts=1),
        "b": EngineRecord(pid=None, admin_port=8102, restarts=0),
    },
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "pod-0"


def test_the_folder_is_made_for_this_user_only(path: Path) -> None:
    folder = PodFolder(path)
    folder.open()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    folder.close()


def test_an_older_folder_is_closed_to_others(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o755)
    folder = PodFolder(path)
    folder.open()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.close()


def test_the_record_is_replaced_in_one_step(path: Path) -> None:
    folder = PodFolder(path)
    folder.open()
    folder.write(RECORD)
    with (path / "pod.json").open() as old:
        folder.write(RECORD)
        assert json.load(old)["instance"] == "life-1"
    assert json.loads((path / "pod.json").read_bytes()) == {
        "version": 1,
        "pod": "pod-0",
        "instance": "life-1",
        "pid": 7,
        "host": "127.0.0.1",
        "serving_port": 8100,
        "gms": {"pid": 8, "socket": "/run/gms.sock", "metrics_port": 8109},
        "engines": {
            "a": {"pid": 9, "admin_port": 8101, "restarts": 1},
            "b": {"pid": None, "admin_port": 8102, "restarts": 0},
        },
    }
    assert sorted(os.listdir(path)) == ["pod.json", "pod.lock"]
    folder.close()


def test_one_supervisor_at_a_time(path: Path) -> None:
    first, second = PodFolder(path), PodFolder(path)
    first.open()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PodFolderError, match=rf"another supervisor \(process {os.getpid()}\)"):
        second.open()
    assert os.listdir("/proc/self/fd") == before
    first.close()
    first.close()
    second.open()
    second.close()


def test_a_lock_whose_file_was_removed_is_not_the_lock(path: Path) -> None:
    """The holder cleans up while another one waits to open: both would hold a lock, on different files."""
    first, second, third = PodFolder(path), PodFolder(path), PodFolder(path)
    first.open()
    first.clean()
    second.open()
    with pytest.raises(PodFolderError):
        third.open()
    first.close()
    second.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(PodFolderError, match=r"cannot be used .*HOTSPARE_RUN_DIR"):
        PodFolder(tmp_path / "run" / "pod-0").open()


def test_clean_removes_what_is_the_pods_and_nothing_else(path: Path) -> None:
    folder = PodFolder(path)
    folder.open()
    folder.write(RECORD)
    (path / "active.lock").touch()
    (path / "engine-a").mkdir()
    (path / "engine-b").mkdir()
    (path / "engine-b" / "core.1").write_text("somebody's")
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind(str(path / "gms-cpu-0.sock"))
        other.bind(str(path / "engine-a" / "zmq-output"))
    folder.clean()
    assert [str(left.relative_to(path)) for left in path.rglob("*")] == ["engine-b", "engine-b/core.1"]
    (path / "engine-b" / "core.1").unlink()
    folder.clean()
    assert not path.exists()
    folder.close()
