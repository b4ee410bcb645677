"""``gateway.json`` in the run folder: by this file commands find a gateway that runs on the same machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from app.plain_file import read_regular
from app.start_error import StartError

log: Final = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between two looks at whether the file is still there."""


class Announcement:
    """The file of one gateway; without a run folder there is none."""

    def __init__(self, run_dir: Path | None, document: dict[str, object]) -> None:
        self._path = run_dir / "gateway.json" if run_dir is not None else None
        self._document = document
        self._lock = threading.Lock()
        """Over every change of the file: whoever withdraws it must not find it written once more."""
        self._over = threading.Event()
        self._complaint = ""

    def write(self) -> None:
        """Have the file there, whole.

        Raises:
            StartError: the folder cannot be written.
        """
        if self._path is None:
            return
        partial = self._path.with_name(f".gateway.json.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(partial, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(json.dumps(self._document))
            partial.replace(self._path)
        except OSError as error:
            raise StartError(f"cannot write {self._path}: {error.strerror}; check --run-dir") from None
        finally:  # a signal may end this between any two of the steps above
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def look_after(self) -> None:
        """Write it again, from a thread of its own, whenever somebody has removed it. One that is there is let be, ours
        or not."""
        if self._path is not None:
            threading.Thread(target=self._look_after, args=(self._path,), name="announcement", daemon=True).start()

    def withdraw(self) -> None:
        """Remove the file if it is still ours. Twice is fine."""
        self._over.set()
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._path is not None and json.loads(read_regular(self._path, 4096)).get("pid") == os.getpid():
                self._path.unlink()

    def _look_after(self, path: Path) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        while not self._over.wait(LOOK_SECONDS):
            with self._lock:
                if self._over.is_set() or os.path.lexists(path):
                    continue
                try:
                    self.write()
                except StartError as error:
                    if str(error) != self._complaint:
                        log.error("commands do not find this gateway: %s", error)
                    self._complaint = str(error)
                    continue
            self._complaint = ""
            log.error("somebody removed %s while the gateway runs: it is there again", path)


@contextlib.contextmanager
def announced(run_dir: Path | None, host: str, port: int, *, certificate: Path | None = None) -> Iterator[Announcement]:
    """Have ``gateway.json`` in the run folder while the gateway runs; it appears whole or not at all.

    Raises:
        StartError: the folder cannot be written.
    """
    document: dict[str, object] = {"pid": os.getpid(), "host": host, "port": port}
    if certificate is not None:  # by which commands know us
        document["tls_certificate"] = os.path.abspath(certificate)
    announcement = Announcement(run_dir, document)
    try:
        announcement.write()
        announcement.look_after()
        yield announcement
    finally:
        announcement.withdraw()
