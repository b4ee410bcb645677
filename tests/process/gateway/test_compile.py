"""``scripts/compile.py`` with two small modules: they do what their sources do, and are used only while these stay."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.compiled import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"),
]

FIRST = """
class Counter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self, data: bytes) -> int:
        self.count += len(data)
        return self.count
"""
SECOND = """
from small.first import Counter

def total(parts: list[bytes]) -> int:
    counter = Counter()
    for part in parts:
        counter.add(part)
    return counter.count
"""
COMPILE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/scripts")
import compile as script
made = Path("made")
script.build(made, ["small/first.py", "small/second.py"], group="small", level="0")
script.sign(made, Path())
"""
USE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from app import compiled
print(compiled.use(Path("made").absolute(), ("small.first", "small.second"), Path(), group="small"))
from small import first, second
print(Path(first.__file__).suffix, Path(second.__file__).suffix, second.total([b"one", b"three"]))
"""


def python(program: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", program, str(ROOT)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_two_small_modules(tmp_path: Path) -> None:
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text(FIRST)
    (package / "second.py").write_text(SECOND)
    python(COMPILE, tmp_path)
    assert python(USE, tmp_path) == ["True", ".so", ".so", "8"]
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "new.py").touch()
    assert python(USE, tmp_path) == ["False", ".py", ".py", "8"]
