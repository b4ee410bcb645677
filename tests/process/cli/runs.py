"""What a measurement that starts a whole fleet leaves behind: nothing, if all is well."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.processes import until


def started_by(folder: Path) -> set[int]:
    """Processes whose temporary folder is this one: those of a run, wherever they have gone to."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"TMPDIR={folder}".encode() in variables:
                found.add(int(entry))
    return found


def assert_nothing_is_left(folder: Path) -> None:
    until(lambda: not started_by(folder), saying="all processes of the run are gone")
    assert list(folder.iterdir()) == []
