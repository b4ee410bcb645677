"""A driver without a GPU: builds the fake libcuda, and gives subprocesses a machine of fake GPUs. See README.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[2]
PARTS = ("process.c", "memory.c", "context.c", "proc_address.c")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,defs")
UUID = "GPU-66616b65-6375-6461-0000-0000000000{:02x}"
"""What the GPU of a number is."""


def compiler() -> str:
    """Skips the test where there is none."""
    for name in ("gcc", "cc"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C compiler to build the fake CUDA driver with; on Debian: apt-get install gcc libc6-dev")


def build(folder: Path) -> Path:
    """The folder with libcuda.so.1 in it, built there if it is not yet. Two processes may do so at once: each builds
    its own, and the last one's takes the name."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as unnamed:
            draft = Path(unnamed.name)
        try:
            sources = [str(SOURCES / part) for part in PARTS]
            command = [compiler(), *FLAGS, "-Wl,-soname,libcuda.so.1", "-o", str(draft), *sources]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, f"the fake CUDA driver does not compile:\n{done.stderr}"
            draft.replace(library)
        finally:
            draft.unlink(missing_ok=True)
    return folder


def built_once(factory: pytest.TempPathFactory) -> Path:
    """`build` in the test session's own folder, which all processes of the session share."""
    base = factory.getbasetemp()
    return build((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fakecuda")


class FakeGpus:
    """A machine with GPUs of its own, for as long as the block runs. `environment` makes a subprocess one of its."""

    def __init__(self, library: Path, *, devices: int = 1, memory_bytes: int = 1 << 30) -> None:
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # memory, where there is such a folder
        self.folder = Path(tempfile.mkdtemp(prefix="fakecuda-", dir=shared))
        self._library = library
        self._devices = devices
        self._memory_bytes = memory_bytes
        (self.folder / "state").mkdir()

    def environment(self, log: str = "calls", **settings: object) -> dict[str, str]:
        """Variables for a subprocess. `strict`, `poison`, `fail`, `delay`, `no_context`, ... are the settings of
        README.md in small letters; strict and poison are on unless set otherwise. `log` names the file for `calls`."""
        values: dict[str, object] = {"strict": 1, "poison": 1, "devices": self._devices, "mem": self._memory_bytes}
        values |= {"state": self.folder / "state", "log": self.folder / f"{log}.log"} | settings
        named = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in values.items()}
        paths = [str(self._library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {**named, "LD_LIBRARY_PATH": ":".join(paths)}

    def calls(self, log: str = "calls") -> list[str]:
        """The calls that were made, and what the driver said besides, in their order."""
        path = self.folder / f"{log}.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [re.sub(r"^fakecuda\[\d+\] ", "", line) for line in lines]

    def complaints(self, log: str = "calls") -> list[str]:
        """Misuse, faults and leaks."""
        return [line for line in self.calls(log) if line.startswith(("MISUSE", "FAULT", "LEAK"))]

    def python(
        self, code: str, *arguments: str, log: str = "calls", **settings: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs code in a process of its own to its end."""
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **self.environment(log, **settings)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    def close(self) -> None:
        """The GPUs' memory and the logs are gone; processes that still use it keep what they have mapped."""
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
