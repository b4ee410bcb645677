"""What processes that are killed leave behind in /dev/shm: the shared memory and semaphores of ``multiprocessing``.

A resource tracker removes them, unless it is killed with the processes it tracks. So who kills a whole session looks
first at what its processes have mapped, and removes that when they are gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - nothing is made there
_NAMES: Final = ("psm_", "sem.mp-")
"""``multiprocessing.shared_memory`` and ``multiprocessing.synchronize`` give these names, with a random end."""
_SESSION: Final = 3
"""In /proc/PID/stat, counted from behind the command's name: state, parent, group, session."""


def members(session: int) -> frozenset[int]:
    """The living processes of a session."""
    return frozenset(pid for pid in _pids() if _session_of(pid) == session)


def ended(session: int, *, timeout_seconds: float) -> bool:
    """Wait until all processes of a session have ended; False: some have not in that time."""
    deadline = time.monotonic() + timeout_seconds
    while left := members(session):
        for pid in left:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
            finally:
                os.close(pidfd)
    return True


def mapped_by(session: int) -> frozenset[Path]:
    """The files that the processes of a session have mapped, of those that ``multiprocessing`` makes."""
    return _named({inode for pid in members(session) for inode in _mapped(pid)})


def remove(files: frozenset[Path]) -> None:
    """Remove those of ``files`` that are this user's and that no process has mapped any more."""
    still = _named({inode for pid in _pids() for inode in _mapped(pid)}) if files else frozenset()
    for path in files - still:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                path.unlink()


def _named(inodes: set[int]) -> frozenset[Path]:
    found = set()
    for path in _FOLDER.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(_NAMES) and path.stat().st_ino in inodes:
                found.add(path)
    return frozenset(found)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def _session_of(pid: int) -> int | None:
    """None: it is gone, or has ended and waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_SESSION])


def _mapped(pid: int) -> set[int]:
    """Inodes in /dev/shm. Not names: sem_open(3) makes a semaphore under another one, and that is shown in maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    columns = (line.split(maxsplit=5) for line in lines)
    return {int(column[4]) for column in columns if len(column) == 6 and column[5].startswith(f"{_FOLDER}/")}
