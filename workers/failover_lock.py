"""The lock that elects: one flock on one file per pod. Who holds it serves; when it dies the kernel hands it on.

What makes that dependable, each learned by measuring:

- **Open it before any socket.** A dying process releases what it closes last first: with the lock's fd numbered above
  the listener's, the lock was free 60 ms before the port was. So the lock must have the lowest number.
- **Forks must not keep it.** An inherited fd shares the open file description and with it the lock: every fork closes
  its copy (``os.register_at_fork``); exec closes it anyway (``O_CLOEXEC``).
- **Waiting costs nothing and cannot be interrupted**: a daemon thread sits in ``flock``, on a descriptor of its own for
  the same open file (a number could be closed and used again under it). To give up, the lock closes its descriptor; a
  grant that comes later finds that, closes the thread's, and so gives the lock back at once.
- **Waiters are served in the order in which they came**: since Linux 5.0 a waiter blocks on the waiter before it, and
  not on the holder, so each release wakes one of them. Only somebody who asks in the very moment between a release and
  that wake-up can come first: whoever gives the lock back on purpose lets some time pass before it asks again.
- **The epoch is one fixed-width write.** It is read and advanced only under the lock; a torn write is impossible, and
  its place on the disk is there from the beginning.
- **The path must still be this file.** If somebody replaced it, two engines could hold two locks: refuse to be elected.
  If somebody only removed it, the holder makes another one (``keep``), which is locked before it has its name, so that
  whoever opens it finds it held; those that wait on the old one find out when they get that, and start again.
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


class EpochLost(FailoverLockError):
    """The file holds no epoch: somebody else wrote into it."""


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
        try:
            os.posix_fallocate(self._fd, 0, EPOCH_DIGITS + 1)  # so that no disk is too full for an epoch later
        except OSError as error:
            os.close(self._fd)
            raise FailoverLockError(
                f"there is no room for the pod's lock file {path}: {error.strerror}; "
                "make room on the disk of the run folder (HOTSPARE_RUN_DIR)"
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
        self._waiting = False
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

    @property
    def waiting(self) -> bool:
        """Whether somebody waits in ``acquire``."""
        return self._waiting

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
        self._waiting = True
        try:
            self.granted_at = await granted
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiting = False
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
            EpochLost: the content is not an epoch.
            FailoverLockError: it cannot be read.
        """
        try:
            raw = os.pread(self._fd, EPOCH_DIGITS + 1, 0)
        except OSError as error:
            raise FailoverLockError(f"cannot read the epoch from {self.path}: {error.strerror}") from error
        if not raw.strip(b"\0"):
            return 0
        if len(raw) != EPOCH_DIGITS + 1 or not raw[:EPOCH_DIGITS].isdigit() or raw[-1:] != b"\n":
            raise EpochLost(
                f"the lock file {self.path} does not hold an epoch; nothing but hotspare may write it. "
                "Remove it, and the engines start again with a new one; the pod need not be stopped"
            )
        return int(raw[:EPOCH_DIGITS])

    def advance_epoch(self, *, at_least: int = 0, anew: bool = False) -> int:
        """Write the next epoch, or ``at_least`` if that is more, and return it. Only the holder may. ``anew``: what the
        file holds does not matter, since ``at_least`` is above every epoch that there was.

        Raises:
            FailoverLockError: the file cannot be read or written.
        """
        if not self._held:
            raise RuntimeError("only the holder of the lock may advance the epoch")
        epoch = at_least if anew else max(self.read_epoch() + 1, at_least)
        try:
            if anew:
                os.ftruncate(self._fd, EPOCH_DIGITS + 1)
            written = os.pwrite(self._fd, b"%0*d\n" % (EPOCH_DIGITS, epoch), 0)
        except OSError as error:
            raise FailoverLockError(f"cannot write the epoch to {self.path}: {error.strerror}") from error
        if written != EPOCH_DIGITS + 1:
            raise FailoverLockError(f"only {written} bytes of the epoch fitted into {self.path}: is the disk full?")
        return epoch

    def holder_pid(self) -> int:
        """Who holds the lock, by what the kernel lists (proc(5), /proc/locks); 0: nobody, or nobody whom this PID
        namespace can name."""
        there = os.fstat(self._fd)
        wanted = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
        with open("/proc/locks", encoding="ascii") as locks:
            for line in locks:
                fields = line.split()  # "1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF"; one that waits has "->"
                if len(fields) > 5 and fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and fields[5] == wanted:
                    return max(0, int(fields[4]))
        return 0

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

    def problem(self) -> str | None:
        """Why this lock can elect nobody (any more), a sentence; None: it can."""
        if self._closed:
            return "its lock is closed"
        return None if self._is_file_at_path() else f"the lock file {self.path} was replaced: its lock elects nobody"

    def missing(self) -> bool:
        """Whether nothing is at the path: its holder makes another file there."""
        return not self._closed and not os.path.lexists(self.path)

    def keep(self) -> str | None:
        """``problem``, for the holder, that makes another file if somebody has removed its own.

        Raises:
            FailoverLockError: there can be none. The lock is still held, and nobody else can be elected either.
        """
        if self._held and self.missing():
            self._make_anew()
        return self.problem()

    def _make_anew(self) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fd = -1
        try:
            epoch = os.pread(self._fd, EPOCH_DIGITS + 1, 0)
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, EPOCH_DIGITS + 1)
                os.pwrite(fd, epoch, 0)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.link(draft, self.path)
            except FileExistsError:
                return  # somebody was faster: this lock elects nobody any more
            finally:
                draft.unlink(missing_ok=True)
            # The number stays: it must be the lowest. The old file's lock goes, and whoever waits for it starts again.
            os.dup2(fd, self._fd, inheritable=False)
        except OSError as error:
            raise FailoverLockError(
                f"the lock file {self.path} was removed and cannot be made again: {error.strerror}"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)
        logger.error(
            "somebody removed the lock file %s while this engine held it: it is there again, and held; nothing but "
            "hotspare may touch the run folder",
            self.path,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_file_at_path(self) -> bool:
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
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
