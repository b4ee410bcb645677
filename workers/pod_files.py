"""The pod's folder on this machine: who runs the pod, and what others (``hotspare status``) may know of it.

Where a supervisor runs the pod it writes ``pod.json``. Where a kubelet does, nobody could: so each engine says in a
file of its own where it is, and those files together are the same record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

VERSION: Final = 1
POD_FILE: Final = "pod.json"
LOCK_FILE: Final = "pod.lock"
ENGINE_FILES: Final = "engine-?.json"
_ENGINE_FILE: Final = re.compile(r"engine-[a-z]\.json")
METRICS_SUFFIX: Final = ".metrics"
"""Of the files in which engines keep their counters over their deaths."""
JOURNAL_SUFFIX: Final = ".sock.state"
"""Of the folder in which a memory service keeps its journal, beside its socket."""


class PodFolderError(Exception):
    """The folder cannot be used, or another supervisor uses it; the message is a sentence for a person."""


class MemoryServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    pid: int | None
    """``None`` while it is not running."""
    socket: str
    metrics_port: int


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pid: int | None
    """The keeper's, or, without one, the engine's. ``None`` while it is not running."""
    admin_port: int
    restarts: int
    apart: bool = False
    """It is in another PID namespace, a container of its own: no pid that it tells means anything here."""


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The document in pod.json."""

    version: int = VERSION
    pod: str
    instance: str
    pid: int | None
    """The supervisor's. ``None``: no process here runs the pod; in Kubernetes the kubelet does."""
    host: str
    serving_port: int
    gms: MemoryServiceRecord | None
    """That of the engines' rank 0."""
    engines: dict[str, EngineRecord]
    more_gms: dict[str, MemoryServiceRecord] | msgspec.UnsetType = msgspec.UNSET
    """Those of further ranks, by process name, where there are such."""


class EngineFile(msgspec.Struct, frozen=True, kw_only=True):
    """``engine-a.json``: an engine that no supervisor speaks for."""

    version: int = VERSION
    pod: str
    instance: str
    engine: str
    pid: int
    """The keeper's, or, without one, the engine's, in its own PID namespace."""
    pid_namespace: int
    host: str
    serving_port: int
    admin_port: int
    gms: tuple[str, ...]
    """Sockets of the memory services, that of rank 0 first; empty: it has none."""


@contextlib.contextmanager
def announced(pod_dir: Path, file: EngineFile) -> Iterator[None]:
    """While inside, the engine's file lies in the pod's folder.

    Raises:
        OSError: it cannot be written.
    """
    path = pod_dir / f"engine-{file.engine}.json"
    draft = pod_dir / f".{path.name}"  # there is one engine of a name in a pod
    draft.write_bytes(msgspec.json.encode(file) + b"\n")
    os.replace(draft, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def own_pid_namespace() -> int:
    """What is equal for processes that see each other by the same pids."""
    return os.stat("/proc/self/ns/pid").st_ino


def record_of(files: Sequence[EngineFile], *, pid_namespace: int) -> PodRecord:
    """What a pod's engines say of it, as one record. ``pid_namespace``: the reader's. Of files of several lives of the
    pod the last one's name it: an engine that it does not know is known by its instance."""
    last = files[-1]
    services = [MemoryServiceRecord(pid=None, socket=socket, metrics_port=0) for socket in last.gms]
    return PodRecord(
        pod=last.pod,
        instance=last.instance,
        pid=None,
        host=last.host,
        serving_port=last.serving_port,
        gms=services[0] if services else None,
        engines={
            file.engine: EngineRecord(
                pid=file.pid if file.pid_namespace == pid_namespace else None,
                admin_port=file.admin_port,
                restarts=0,
                apart=file.pid_namespace != pid_namespace,
            )
            for file in files
        },
        more_gms={f"gms-{rank}": service for rank, service in enumerate(services) if rank} or msgspec.UNSET,
    )


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

    @property
    def intact(self) -> bool:
        """Whether the lock is still that of the folder, and pod.json, once written, in it."""
        return self._lock >= 0 and _is_file_at(self._lock, self._path / LOCK_FILE) and (self._path / POD_FILE).exists()

    def restore(self) -> bool:
        """Make the folder and its lock again if somebody has removed them; whether that was needed.

        Raises:
            PodFolderError: it cannot be made or written, or another supervisor has it by now.
        """
        if self._lock >= 0 and _is_file_at(self._lock, self._path / LOCK_FILE):
            return False
        self.close()
        self.open()
        return True

    def write(self, record: PodRecord) -> None:
        """Replace pod.json in one step: a reader sees the old document or the new one."""
        draft = self._path / f".{POD_FILE}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(record) + b"\n")
        os.replace(draft, self._path / POD_FILE)

    def clean(self) -> None:
        """Remove what means something only while the pod runs: pod.json, sockets, locks, counters, a memory service's
        journal (its pages are gone with all who had them), folders left empty.

        Call it when all processes of the pod have ended.
        """
        for at, folders, files in os.walk(self._path, topdown=False):
            here = Path(at)
            journal = here.name.endswith(JOURNAL_SUFFIX)
            for name in files:
                entry = here / name
                with contextlib.suppress(OSError):
                    known = (
                        journal
                        or name == POD_FILE
                        or _ENGINE_FILE.fullmatch(name)
                        or entry.suffix in (".lock", ".key", METRICS_SUFFIX)
                    )
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
                    "stop that one, or choose another folder with --run-dir (HOTSPARE_RUN_DIR) or another name for "
                    "the pod (HOTSPARE_POD)"
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
