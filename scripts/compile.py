#!/usr/bin/env python3
"""Compile the gateway's hot path with mypyc into build/compiled: `make compile`. Needs a C compiler.

``app/compiled.py`` has the list of modules, and says when a build is used.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from app.compiled import FOLDER, GROUP, MODULES, sign  # noqa: E402


def build(
    into: Path, sources: Sequence[str], *, group: str = GROUP, options: Sequence[str] = (), level: str = "2"
) -> None:
    """Compile these files, paths relative to the working folder, so that ``into`` has the extension modules only."""
    from mypyc.build import mypycify
    from setuptools import setup

    with tempfile.TemporaryDirectory(prefix="hotspare-compile-") as name:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):  # remarks on what is slower
                extensions = mypycify(
                    [*options, *sources],
                    opt_level=level,
                    debug_level="0",
                    multi_file=True,
                    group_name=group,
                    target_dir=f"{name}/c",
                )
        except SystemExit:
            sys.exit(f"compile: mypyc does not take the sources\n{said.getvalue()}")
        setup(
            name=group,
            packages=[],
            py_modules=[],
            ext_modules=extensions,
            script_args=[
                "--quiet",
                "build_ext",
                f"--parallel={os.cpu_count() or 1}",
                f"--build-lib={into}",
                f"--build-temp={name}",
            ],
        )


def main() -> None:
    os.chdir(ROOT)
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiled-", dir=FOLDER.parent) as name:
        made = Path(name) / "made"
        sources = [f"{module.replace('.', '/')}.py" for module in MODULES]
        build(made, sources, options=["--config-file", "pyproject.toml"])
        sign(made)
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        made.rename(FOLDER)
    print(f"compile: {len(MODULES)} modules in {FOLDER.relative_to(ROOT)}; make clean removes them")


if __name__ == "__main__":
    main()
