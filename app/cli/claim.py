"""``hotspare up``'s claim on its run folder: one ``up`` at a time, and nothing of it left behind when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from app.cli.errors import CliError
from workers.exit_codes import ExitCode

LOCK_FILE: Final = "up.lock"
LOGS: Final = "logs"
PREVIOUS: Final = ".1"
"""What the name of an earlier log ends with."""


class RunDirClaim:
    """Holds the run folder while inside. Anything made for an attempt that came to nothing is removed again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.keep_logs = False
        """Set once there is something in them that a person may want to read afterwards."""
        self._made: list[Path] = []
        self._rotated = False
        self._fd = -1

    def __enter__(self) -> Self:
        """Make the folder if need be, and lock it.

        Raises:
            CliError: not writable, or another ``up`` is there.
        """
        try:
            self._make(self.run_dir)
            self._fd = self._lock()
            self._make(self.logs)
        except CliError:
            self._unmake()
            raise
        except OSError as error:
            self._unmake()
            raise _unusable(self.run_dir, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rotated and not self.keep_logs:
            self._take_logs_back()
        with contextlib.suppress(OSError):
            if _is_at(self._fd, self.run_dir / LOCK_FILE):  # and not another one's, after somebody removed ours
                (self.run_dir / LOCK_FILE).unlink()  # while it is held: see _lock
        os.close(self._fd)
        self._unmake()

    def restore(self) -> bool:
        """Have the lock and the folder of the logs there again if somebody has removed them; whether that was needed.

        Raises:
            CliError: they cannot be made, or another ``up`` is there by now.
        """
        try:
            if _is_at(self._fd, self.run_dir / LOCK_FILE) and self.logs.is_dir():
                return False
            self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self.run_dir, 0o700)
            if not _is_at(self._fd, self.run_dir / LOCK_FILE):
                old, self._fd = self._fd, self._lock()
                os.close(old)
        except OSError as error:
            raise _unusable(self.run_dir, error) from error
        return True

    @property
    def logs(self) -> Path:
        return self.run_dir / LOGS

    def rotate_logs(self, names: Collection[str]) -> None:
        """Make room for the logs of the processes in ``names``: one earlier log of each is kept, as ``NAME.log.1``.
        Those of processes that this run does not have would only mislead, and are removed.

        Raises:
            CliError: the folder cannot be written.
        """
        self._rotated = True
        try:
            for log in [*self.logs.glob("*.log"), *self.logs.glob(f"*.log{PREVIOUS}")]:
                name = log.name.removesuffix(PREVIOUS).removesuffix(".log")
                if name not in names:
                    log.unlink(missing_ok=True)
                elif log.suffix != PREVIOUS:
                    log.replace(_previous(log))
        except OSError as error:
            raise _unusable(self.run_dir, error) from error

    def _take_logs_back(self) -> None:
        """As before ``rotate_logs``, as far as may be: what an attempt wrote that came to nothing is of no use."""
        with contextlib.suppress(OSError):
            for log in self.logs.glob("*.log"):
                log.unlink(missing_ok=True)
            for log in self.logs.glob(f"*.log{PREVIOUS}"):
                log.replace(log.with_suffix(""))

    def sweep(self, pods: Iterable[str]) -> None:
        """Remove what killed processes left. A pod, or a gateway, that runs after all keeps its files."""
        from app.cli.run_dir import GATEWAY_FILE, is_running, read_gateway
        from workers.pod_files import PodFolder, PodFolderError

        with contextlib.suppress(CliError):
            gateway = read_gateway(self.run_dir)
            if gateway is not None and not is_running(gateway.pid, module="app"):
                (self.run_dir / GATEWAY_FILE).unlink(missing_ok=True)

        for pod in pods:
            path = self.run_dir / pod
            if not path.is_dir():
                continue
            folder = PodFolder(path)
            with contextlib.suppress(PodFolderError):
                folder.open()
                folder.clean()
            folder.close()

    def _make(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700)
            self._made.append(path)

    def _unmake(self) -> None:
        """Folders made here go again, unless something is in them."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()

    def _lock(self) -> int:
        path = self.run_dir / LOCK_FILE
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An `up` that ends removes the file: then this is a lock on nothing, and the next one is the real one.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(fd)):
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                        return fd
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise CliError(
                    f"another `hotspare up` (pid {holder}) runs in {self.run_dir}; "
                    "stop it, or choose another folder with --run-dir",
                    code=ExitCode.BAD_CONFIGURATION,
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


def _previous(log: Path) -> Path:
    return log.with_name(log.name + PREVIOUS)


def _unusable(run_dir: Path, error: OSError) -> CliError:
    return CliError(
        f"the run folder {run_dir} cannot be used: {error.strerror}; "
        "choose a writable one with --run-dir or HOTSPARE_RUN_DIR",
        code=ExitCode.BAD_CONFIGURATION,
    )
