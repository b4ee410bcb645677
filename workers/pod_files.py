"""The pod's folder on this machine: who runs the pod, and what others (``hotspare status``) may know of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

VERSION: Final = 1
POD_FILE: Final = "pod.json"
LOCK_FILE: Final = "pod.lock"
JOURNAL_SUFFIX: Final = ".sock.state"
"""Of the folder in which a memory service keeps its journal, beside its socket."""


class PodFolderError(Exception):
    """The folder cannot be used, or another supervisor uses it; the message is a sentence for a person."""


class MemoryServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    pid: int | None
    """``None`` while it is not running."""
    socket: str
    metrics_port: int


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    pid: int | None
    """The keeper's, or, without one, the engine's. ``None`` while it is not running."""
    admin_port: int
    restarts: int


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The document in pod.json."""

    version: int = VERSION
    pod: str
    instance: str
    pid: int
    """The supervisor's."""
    host: str
    serving_port: int
    gms: MemoryServiceRecord | None
    engines: dict[str, EngineRecord]


class PodFolder:
    """The folder, locked for one supervisor from ``open`` to ``close``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    def open(self) -> None:
        """Make the folder, for this user only, and lock it.

        Raises:
            PodFolderError: it cannot be made or written, or another supervisor has it.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.mkdir(mode=0o700, exist_ok=True)
            os.chmod(self._path, 0o700)  # an older folder may be open to others; sockets live here
            self._lock = self._open_lock()
        except OSError as error:
            raise PodFolderError(
                f"the pod's folder {self._path} cannot be used ({error.strerror or error}); "
                "set HOTSPARE_RUN_DIR to a folder that this user can write to"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)

    def write(self, record: PodRecord) -> None:
        """Replace pod.json in one step: a reader sees the old document or the new one."""
        draft = self._path / f".{POD_FILE}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(record) + b"\n")
        os.replace(draft, self._path / POD_FILE)

    def clean(self) -> None:
        """Remove what means something only while the pod runs: pod.json, sockets, locks, a memory service's journal
        (its pages are gone with all who had them), folders left empty.

        Call it when all processes of the pod have ended.
        """
        for at, folders, files in os.walk(self._path, topdown=False):
            here = Path(at)
            journal = here.name.endswith(JOURNAL_SUFFIX)
            for name in files:
                entry = here / name
                with contextlib.suppress(OSError):
                    known = journal or name == POD_FILE or entry.suffix == ".lock"
                    if known or stat.S_ISSOCK(entry.lstat().st_mode):
                        entry.unlink()
            for name in folders:
                with contextlib.suppress(OSError):
                    (here / name).rmdir()
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def close(self) -> None:
        """Give the lock back. Twice is fine."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            os.close(fd)

    def _open_lock(self) -> int:
        path = self._path / LOCK_FILE
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file_at(fd, path):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).strip().decode("ascii", "replace")
                os.close(fd)
                raise PodFolderError(
                    f"the pod in {self._path} is run by another supervisor (process {holder or 'unknown'}); "
                    "stop that one, or set HOTSPARE_POD to another name"
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its last holder removed the file before it let go: lock the one that is there now


def _is_file_at(fd: int, path: Path) -> bool:
    ours = os.fstat(fd)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
