from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machine import Machine, StartUp


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """``hotspare up`` with sim engines on free ports; whatever a test did, nothing of it is left at its end."""
    with ExitStack() as stack:

        def start(*flags: str, **env: str) -> Machine:
            machine = Machine(tmp_path / "run", tmp_path, flags, env)
            stack.callback(machine.end)
            return machine

        yield start


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for the run, whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hs-") as name:
        yield Path(name)
