"""The place of a service's socket: one service at a time has it, and nobody but its user can enter."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

log: Final = logging.getLogger("gms")

MAX_PATH_BYTES: Final = 107
BACKLOG: Final = 128


class StartError(Exception):
    """The service cannot be started as configured. One sentence that says what to change."""


class SocketPath:
    """Holds a lock beside the path from `with` on: what else belongs to the service, its journal above all, is this
    process's alone meanwhile. Entering and `listen` raise StartError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = -1
        self._bound: tuple[int, int] | None = None  # device and inode of our socket

    def __enter__(self) -> Self:
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            raise StartError(f"The socket path has more than {MAX_PATH_BYTES} bytes: {self.path}. Use a shorter one.")
        folder = os.path.dirname(self.path) or "."
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
                log.warning("others may enter the socket's folder %s; make it 0700", folder)
            self._lock_fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same_file(self._lock_fd, f"{self.path}.lock"):
                raise FileNotFoundError(errno.ENOENT, "its lock file was taken away meanwhile; try again")
            if _answers(self.path):  # though we have the lock: somebody removed its file under a living service
                raise BlockingIOError(errno.EAGAIN, "a service listens there")
        except OSError as error:
            self._unlock()
            raise self._taken_or_impossible(error) from error
        return self

    def listen(self) -> socket.socket:
        """A listening socket, the caller's, in the place of one that a dead service left: the lock says it is dead."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._make_room()
            os.fchmod(listener.fileno(), 0o600)  # bind takes the mode over: there is no moment with a wider one
            listener.bind(self.path)
            self._bound = _identity(self.path)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise self._taken_or_impossible(error) from error
        return listener

    def restore(self) -> socket.socket | None:
        """A new listening socket, the caller's, if somebody removed ours, once there is a folder for it; otherwise
        None. A lock file that was removed is made and locked again, too. Raises StartError: the place is taken, or
        cannot be had now."""
        if self._bound is None or not os.path.isdir(os.path.dirname(self.path) or "."):
            return None
        try:
            if not _same_file(self._lock_fd, f"{self.path}.lock"):
                self._lock_again()
            return None if _is_at(self._bound, self.path) else self.listen()
        except OSError as error:
            raise self._taken_or_impossible(error) from error

    def _lock_again(self) -> None:
        lock_fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock_fd)
            raise
        self._unlock()
        self._lock_fd = lock_fd

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bound is not None and _is_at(self._bound, self.path):  # else it is another service's by now
            os.unlink(self.path)
        self._bound = None
        self._unlock()

    def _make_room(self) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise FileExistsError(errno.EEXIST, "something that is no socket is there")
            os.unlink(self.path)

    def _taken_or_impossible(self, error: OSError) -> StartError:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return StartError(f"Another memory service is alive at {self.path}; stop it, or use another socket.")
        return StartError(f"The socket {self.path} cannot be made: {error.strerror or error}.")

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _same_file(fd: int, path: str) -> bool:
    """Whether an open file is the one at `path`."""
    found = os.fstat(fd)
    return _is_at((found.st_dev, found.st_ino), path)


def _is_at(identity: tuple[int, int], path: str) -> bool:
    try:
        return _identity(path) == identity
    except FileNotFoundError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it listens, and is too busy to say so
    return True
