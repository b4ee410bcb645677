"""One engine of a name in a pod: a flock on a file in the pod's folder, held by the engine's first process.

That is its keeper, or without one the engine itself. The kernel releases the lock when that process ends, however it
ends. Forks close their copy (``workers.forks``), and what is executed never has it: an engine that its dead keeper left
behind, and which the kernel is about to kill, keeps nobody from starting. In Kubernetes the engines of a pod are
containers with one shared folder, and a lock of the one kernel below them: a container that is started again has it as
soon as the one before it is dead.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from workers.forks import close_in_forks

WAIT_SECONDS: Final = 2.0
"""For one of the same name that is just dying."""
LOOK_SECONDS: Final = 0.02


class EngineLockError(Exception):
    """The engine cannot have its name; the message is a sentence for a person."""


class EngineLock:
    """Held from the constructor on. Keep it as long as the process lives."""

    def __init__(self, pod_dir: Path, engine: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        """Take it, for one that is dying after a moment.

        Raises:
            EngineLockError: another engine of this name runs in this pod, or the file cannot be used.
        """
        self.path = pod_dir / f"engine-{engine}.lock"
        deadline = time.monotonic() + wait_seconds
        try:
            while (fd := self._take()) is None:
                if time.monotonic() >= deadline:
                    raise EngineLockError(
                        f"another engine {engine} runs in the pod's folder {pod_dir}{self._holder()}; give this one "
                        "another letter with --engine-id (HOTSPARE_ENGINE_ID), or another pod with --pod or --run-dir"
                    )
                time.sleep(LOOK_SECONDS)
        except OSError as error:
            raise EngineLockError(
                f"the lock file {self.path} cannot be used: {error.strerror}; "
                "the run folder (HOTSPARE_RUN_DIR) must be writable by this user"
            ) from error
        self._fd = fd
        close_in_forks(self)

    def close(self) -> None:
        """Give it back. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self) -> int | None:
        """Lock the file that is at the path now; None: somebody else holds it, or it was removed meanwhile."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), self.path.stat()):
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _holder(self) -> str:
        """Its pid is one of its own PID namespace, which need not be this one."""
        try:
            text = self.path.read_text().strip()
        except OSError:
            return ""
        return f" (process {text})" if text.isdecimal() else ""
