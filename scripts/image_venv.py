"""Fill an image's virtual environment: `image_venv.py FOLDER GROUP...`, or `image_venv.py FOLDER --wheel FILE`.

Only the Dockerfile runs this, with a Python that has uv. Groups are requirements/GROUP.txt, installed by their hashes;
the wheel is hotspare's own, with what `make compile` made of it beside it, if it did.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

from setup_venv import SetupError, install_groups


def install_wheel(python: Path, wheel: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        python,
        "--quiet",
        "--offline",
        "--no-deps",
        wheel,
    ]
    subprocess.run([str(word) for word in command], check=True)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    compiled = wheel.parent / "compiled"
    if compiled.is_dir():  # where app/compiled.py looks for it
        shutil.copytree(compiled, packages / "build" / "compiled")
    # Sources in an image do not change: what is compiled need not be held against their times.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for package in ("app", "gms", "workers"):
        if not compileall.compile_dir(packages / package, quiet=1, workers=0, invalidation_mode=unchecked):
            sys.exit(f"image_venv: {package} cannot be compiled")


def main() -> None:
    python = Path(sys.argv[1]) / "bin" / "python"
    if sys.argv[2] == "--wheel":
        install_wheel(python, Path(sys.argv[3]))
        return
    try:
        install_groups(sys.argv[2:], python=python, tools=sys.executable)
    except SetupError as error:
        sys.exit(f"image_venv: {error}")


if __name__ == "__main__":
    main()
