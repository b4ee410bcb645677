from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gms.socket_path import MAX_PATH_BYTES, SocketPath, StartError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gms-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def enter(path: Path) -> None:
    with SocketPath(str(path)):
        pass


def reachable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_it_listens_in_a_closed_place_and_leaves_nothing_but_its_lock(folder: Path) -> None:
    path = folder / "pod" / "gms.sock"
    with SocketPath(str(path)) as place, place.listen() as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        assert reachable(path)
    assert [left.name for left in path.parent.iterdir()] == ["gms.sock.lock"]


def test_there_is_no_moment_with_a_wider_mode(folder: Path) -> None:
    before = os.umask(0)
    try:
        with SocketPath(str(folder / "s")) as place, place.listen():
            assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_second_service_is_refused_before_it_touches_anything(folder: Path) -> None:
    path = folder / "s"
    with SocketPath(str(path)) as place, place.listen():
        with pytest.raises(StartError, match="Another memory service is alive at"):
            enter(path)
        assert reachable(path)
    enter(path)


def test_the_socket_of_a_killed_service_is_replaced(folder: Path) -> None:
    path = folder / "s"
    code = (
        "import sys\nfrom gms.socket_path import SocketPath\n"
        "with SocketPath(sys.argv[1]) as place:\n    listener = place.listen()\n"
        "    print('listens', flush=True)\n    sys.stdin.read()"
    )
    service = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert service.stdout is not None
        assert service.stdout.readline() == b"listens\n"
        with pytest.raises(StartError, match="alive"):
            enter(path)
        service.send_signal(signal.SIGKILL)
    finally:
        service.kill()
        service.communicate(timeout=10)
    assert path.exists()
    with SocketPath(str(path)) as place, place.listen():
        assert reachable(path)


def test_what_is_no_socket_is_not_removed(folder: Path) -> None:
    path = folder / "data"
    path.write_text("precious")
    with SocketPath(str(path)) as place, pytest.raises(StartError, match="cannot be made: something that is no socket"):
        place.listen()
    assert path.read_text() == "precious"
    (folder / "link").symlink_to(path)
    with SocketPath(str(folder / "link")) as place, pytest.raises(StartError, match="no socket"):
        place.listen()
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_is_refused(folder: Path) -> None:
    name = "s" * (MAX_PATH_BYTES - len(os.fsencode(folder)) - 1)
    with SocketPath(str(folder / name)) as place, place.listen():
        pass
    with pytest.raises(StartError, match="more than 107 bytes"):
        enter(folder / f"{name}s")
    with pytest.raises(StartError, match="more than 107 bytes"):
        enter(folder / ("é" * (len(name) // 2 + 1)))


def test_a_folder_that_cannot_be_had_is_told(folder: Path) -> None:
    (folder / "file").touch()
    for place, why in (("file/gms.sock", "File exists"), ("file/pod/gms.sock", "Not a directory")):
        with pytest.raises(StartError, match=f"{place} cannot be made: {why}"):
            enter(folder / place)


def test_a_folder_that_others_may_enter_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.chmod(0o755)
    enter(folder / "s")
    assert f"others may enter the socket's folder {folder}; make it 0700" in caplog.text


def test_a_socket_that_somebody_removed_is_no_error_at_the_end(folder: Path) -> None:
    with SocketPath(str(folder / "s")) as place, place.listen():
        (folder / "s").unlink()


def test_an_error_inside_gives_the_place_back(folder: Path) -> None:
    path = folder / "s"
    with pytest.raises(RuntimeError), SocketPath(str(path)) as place, place.listen():
        raise RuntimeError
    assert not path.exists()
    enter(path)


def test_a_place_that_was_removed_is_had_again_once_there_is_a_folder(folder: Path) -> None:
    path = folder / "pod" / "s"
    with SocketPath(str(path)) as place, place.listen() as first:
        assert place.restore() is None
        shutil.rmtree(path.parent)
        assert place.restore() is None  # the folder is somebody else's to make
        path.parent.mkdir(mode=0o700)
        second = place.restore()
        assert second is not None
        with second:
            first.close()
            assert reachable(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert place.restore() is None
            with pytest.raises(StartError, match="Another memory service is alive at"):
                enter(path)
    assert [left.name for left in path.parent.iterdir()] == ["s.lock"]


def test_a_lock_file_alone_that_was_removed_is_locked_again(folder: Path) -> None:
    path = folder / "s"
    with SocketPath(str(path)) as place, place.listen():
        Path(f"{path}.lock").unlink()
        assert place.restore() is None
        assert reachable(path)
        with pytest.raises(StartError, match="Another memory service is alive at"):
            enter(path)


def test_a_place_that_another_service_has_by_now_is_left_to_it(folder: Path) -> None:
    path = folder / "s"
    with SocketPath(str(path)) as place, place.listen():
        for removed in (path, Path(f"{path}.lock")):
            removed.unlink()
        with SocketPath(str(path)) as other, other.listen():
            with pytest.raises(StartError, match="Another memory service is alive at"):
                place.restore()
            assert reachable(path)
        assert not path.exists()
