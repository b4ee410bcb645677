"""``hotspare up``'s claim on its run folder: one ``up`` at a time, and nothing of it left behind when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from app.cli.errors import CliError
from workers.exit_codes import ExitCode

LOCK_FILE: Final = "up.lock"
LOGS: Final = "logs"
GATEWAY_FILE: Final = "gateway.json"


class RunDirClaim:
    """Holds the run folder while inside. Anything made for an attempt that came to nothing is removed again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.keep_logs = False
        """Set once there is something in them that a person may want to read afterwards."""
        self._made: list[Path] = []
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
            raise CliError(
                f"the run folder {self.run_dir} cannot be used: {error.strerror}; "
                "choose a writable one with --run-dir or HOTSPARE_RUN_DIR",
                code=ExitCode.BAD_CONFIGURATION,
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.keep_logs:
            for log in self.logs.glob("*.log"):
                log.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.logs.rmdir()
        (self.run_dir / LOCK_FILE).unlink(missing_ok=True)  # while it is held: see _lock
        os.close(self._fd)
        self._unmake()

    @property
    def logs(self) -> Path:
        return self.run_dir / LOGS

    def sweep(self, pods: Iterable[str]) -> None:
        """Remove what killed processes left. A pod, or a gateway, that runs after all keeps its files."""
        from app.cli.run_dir import is_running, read_gateway
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
