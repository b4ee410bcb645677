"""The lock that elects: one flock on one file per pod. Who holds it serves; when it dies the kernel hands it on.

What makes that dependable, each learned by measuring:

- **Open it before any socket.** A dying process releases what it closes last first: with the lock's fd numbered above
  the listener's, the lock was free 60 ms before the port was. So the lock must have the lowest number.
- **Forks must not keep it.** An inherited fd shares the open file description and with it the lock: every fork closes
  its copy (``os.register_at_fork``); exec closes it anyway (``O_CLOEXEC``).
- **Waiting costs nothing and cannot be interrupted**: a daemon thread sits in ``flock``, on a descriptor of its own for
  the same open file (a number could be closed and used again under it). To give up, the lock closes its descriptor; a
  grant that comes later finds that, closes the thread's, and so gives the lock back at once.
- **The epoch is one fixed-width write.** It is read and advanced only under the lock; a torn write is impossible.
- **The path must still be this file.** If somebody replaced it, two engines could hold two locks: refuse to be elected.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Self

from workers.forks import close_in_forks

logger = logging.getLogger(__name__)

EPOCH_DIGITS = 20
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "ceph",
        "glusterfs",
        "lustre",
        "afs",
        "ncpfs",
        "gfs2",
        "ocfs2",
    }
)
"""flock is not the kernel's alone there: a grant may come late, twice, or not at all."""


class FailoverLockError(Exception):
    """The lock cannot be trusted; the message says why and what to do."""


class FlockFailoverLock:
    """One engine's end of the pod's lock. Construct it before anything opens a socket."""

    def __init__(self, path: Path) -> None:
        """Open the lock file, creating it if need be; does not lock.

        Raises:
            FailoverLockError: the folder is missing or not writable, or lies on a network file system.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FailoverLockError(
                f"cannot open the pod's lock file {path}: {error.strerror}; "
                "the run folder (HOTSPARE_RUN_DIR) must exist and be writable by this user"
            ) from error
        file_system = _file_system_of(os.fstat(self._fd).st_dev)
        if file_system in NETWORK_FILE_SYSTEMS or file_system.startswith("fuse."):
            os.close(self._fd)
            raise FailoverLockError(
                f"the pod's lock file {path} lies on {file_system}, where flock does not elect reliably; "
                "put HOTSPARE_RUN_DIR on a local file system"
            )
        self._held = False
        self._closed = False
        self.granted_at: float | None = None
        """``time.monotonic()`` of the grant, read in the waiting thread and not when the loop got round to it."""
        close_in_forks(self)

    @property
    def fd(self) -> int:
        """The descriptor's number, or -1 once closed."""
        return self._fd

    @property
    def held(self) -> bool:
        return self._held

    async def acquire(self) -> None:
        """Wait, without polling, until this engine is the elected one.

        Cancelling closes the lock for good: a grant that comes later is given back at once.

        Raises:
            FailoverLockError: the file at the path is not the one locked, or flock failed.
        """
        if self._closed or self._held:
            raise RuntimeError("acquire() on a lock that is closed or held")
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[float] = loop.create_future()

        def deliver(at: float | None, error: OSError | None) -> None:
            if granted.done():
                return
            if error is not None:
                granted.set_exception(FailoverLockError(f"waiting for {self.path} failed: {error.strerror}"))
            elif at is not None:
                granted.set_result(at)

        def wait(fd: int) -> None:
            at: float | None = None
            failure: OSError | None = None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                at = time.monotonic()
            except OSError as error:
                failure = error
            finally:
                os.close(fd)  # the lock belongs to the open file: it stays while self has its descriptor, or goes now
            try:
                loop.call_soon_threadsafe(deliver, at, failure)
            except RuntimeError:
                logger.debug("the lock was granted after the event loop had closed")

        threading.Thread(target=wait, args=(os.dup(self._fd),), name="failover-lock", daemon=True).start()
        try:
            self.granted_at = await granted
        except asyncio.CancelledError:
            self.close()
            raise
        self._held = True
        if not self._is_file_at_path():
            self.close()
            raise FailoverLockError(
                f"the lock file {self.path} was replaced while this engine waited on it, so its lock elects nobody; "
                "this engine must start again. Nothing but hotspare may touch the run folder"
            )

    def read_epoch(self) -> int:
        """The last epoch written, 0 for a new file.

        Raises:
            FailoverLockError: the content is not an epoch.
        """
        try:
            raw = os.pread(self._fd, EPOCH_DIGITS + 1, 0)
        except OSError as error:
            raise FailoverLockError(f"cannot read the epoch from {self.path}: {error.strerror}") from error
        if not raw:
            return 0
        if len(raw) != EPOCH_DIGITS + 1 or not raw[:EPOCH_DIGITS].isdigit() or raw[-1:] != b"\n":
            raise FailoverLockError(
                f"the lock file {self.path} does not hold an epoch; nothing but hotspare may write it. "
                "Stop the pod and remove the file"
            )
        return int(raw[:EPOCH_DIGITS])

    def advance_epoch(self, *, at_least: int = 0) -> int:
        """Write the next epoch, or ``at_least`` if that is more, and return it. Only the holder may.

        Raises:
            FailoverLockError: the file cannot be read or written.
        """
        if not self._held:
            raise RuntimeError("only the holder of the lock may advance the epoch")
        epoch = max(self.read_epoch() + 1, at_least)
        try:
            written = os.pwrite(self._fd, b"%0*d\n" % (EPOCH_DIGITS, epoch), 0)
        except OSError as error:
            raise FailoverLockError(f"cannot write the epoch to {self.path}: {error.strerror}") from error
        if written != EPOCH_DIGITS + 1:
            raise FailoverLockError(f"only {written} bytes of the epoch fitted into {self.path}: is the disk full?")
        return epoch

    def release(self) -> None:
        """Let the next engine have it, and keep the file open to wait again."""
        if self._held:
            self._held = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up for good; idempotent. A held lock is released."""
        if not self._closed:
            self._closed, self._held = True, False
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_file_at_path(self) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        here = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _file_system_of(device: int) -> str:
    """Type of the file system with this device number (proc(5), mountinfo), or "" if it is not listed."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""
