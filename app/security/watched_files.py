"""Files that are read again when they change: keys, tokens and certificates are replaced while the gateway runs.

They are looked at rather than listened to: inotify says nothing of a file behind a symbolic link that is exchanged two
folders further up, which is how Kubernetes replaces what it mounts.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from app.plain_file import read_regular
from app.start_error import StartError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
MAX_BYTES = 1 << 20

Signature = tuple[tuple[int, ...] | None, ...]


def read_text(path: Path, name: str) -> str:
    """A small text file; ``name`` is the setting that named it.

    Raises:
        StartError: it cannot be read, is too large, or no text.
    """
    hint = f"check {name} (HOTSPARE_{name.upper()})"
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}; {hint}") from None
    if len(data) > MAX_BYTES:
        raise StartError(f"{path} is larger than {MAX_BYTES} bytes; {hint}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise StartError(f"{path} is not UTF-8 text; {hint}") from None


def signature(paths: Sequence[Path]) -> Signature:
    """What tells one content from the next. A file that is not there is a content, too."""

    def one(path: Path) -> tuple[int, ...] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    return tuple(map(one, paths))


class WatchedFiles:
    """Files that belong together. Make it *before* they are read for the first time: no change is missed then."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = signature(paths)
        self._complained = ""

    async def follow(self, reload: Callable[[], str]) -> None:
        """Call ``reload`` in a thread after each change, until cancelled. It returns what there is now, in words; with
        a :class:`StartError` the old content stays in use, and that is said once. After any other error, which is a
        bug of ours or the machine's lack of something, it is tried again at the next look."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look(reload)
            except Exception as error:
                self._complain(f"reading files again failed ({type(error).__name__}: {error})", trace=True)

    async def _look(self, reload: Callable[[], str]) -> None:
        seen = await asyncio.to_thread(signature, self._paths)
        if seen == self._seen:
            return
        try:
            said = await asyncio.to_thread(reload)
        except StartError as error:
            self._complain(str(error))
        else:
            logger.info("%s", said)
            self._complained = ""
        self._seen = seen

    def _complain(self, problem: str, *, trace: bool = False) -> None:
        if problem != self._complained:
            self._complained = problem
            logger.error("%s; what was read before stays in use", problem, exc_info=trace)
