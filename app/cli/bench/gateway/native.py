"""The mock worker, the load generator and what starts them: small C programs, because Python's own cost would hide a
gateway's."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final, NamedTuple

from app.cli.bench.system import BenchError

COMPILE_SECONDS: Final = 120.0
_COMPILERS: Final = ("cc", "gcc", "clang")


class Tools(NamedTuple):
    """The programs."""

    launch: Path
    worker: Path
    load: Path


def build(folder: Path) -> Tools:
    """Compile them into ``folder``, which takes about a second.

    Raises:
        BenchError: there is no C compiler, or it fails.
    """
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BenchError("a C compiler is needed and none is there; install one (Debian, Ubuntu: apt-get install gcc)")
    tools = Tools(folder / "launch", folder / "mock-worker", folder / "load")
    with as_file(files("app.cli.bench.gateway") / "native") as sources:
        for program, source in zip(tools, ("launch.c", "mock_worker.c", "load.c"), strict=True):
            command = [compiler, "-O2", "-o", str(program), str(sources / source)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            except subprocess.CalledProcessError as error:
                raise BenchError(f"{source} does not compile with {compiler}:\n{error.stderr.strip()}") from error
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BenchError(f"the C compiler {compiler} cannot be used: {error}") from error
    return tools
