"""When compiled modules are used: a build that is there, and of these very sources."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from app import compiled


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("app/one.py", "app/inner/two.py", "workers/three.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path


@pytest.fixture
def build(root: Path) -> Path:
    folder = root / "build"
    folder.mkdir()
    compiled.sign(folder, root)
    return folder


def test_without_a_build_there_is_nothing_to_say(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert compiled.fit(root / "build", root) is None
    assert not compiled.use(root / "build", (), root)
    assert not caplog.records


def test_a_build_fits_the_sources_that_it_was_made_from(root: Path, build: Path) -> None:
    assert compiled.fit(build, root)


@pytest.mark.parametrize("name", ["app/one.py", "app/inner/two.py", "app/new.py", "workers/three.py"])
def test_a_build_of_other_sources_is_not_used_and_that_is_said(
    root: Path, build: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (root / name).write_text("# changed\n")
    assert compiled.fit(build, root) is False
    with caplog.at_level(logging.WARNING):
        assert not compiled.use(build, (), root)
    assert "make compile" in caplog.text


def test_a_build_for_another_python_is_not_used(root: Path, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "EXTENSION_SUFFIXES", [".cpython-399-x86_64-linux-gnu.so"])
    assert compiled.fit(build, root) is False


def test_sources_and_compiled_modules_are_not_mixed(root: Path, build: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not compiled.use(build, ("app.settings", "app.compiled"), root)
    assert "app.compiled were imported before" in caplog.text


def test_a_damaged_build_is_a_sentence(root: Path, build: Path) -> None:
    with pytest.raises(compiled.StartError, match=r"is damaged .*; make compile makes it anew"):
        compiled.use(build, ("app.not_there",), root, group="not_there")


def test_all_of_them_exist_and_none_is_imported_before_the_server_starts() -> None:
    for name in compiled.MODULES:
        assert (compiled.ROOT / f"{name.replace('.', '/')}.py").is_file(), name
    program = (
        "import sys, app.__main__, app.start, app.child, app.telemetry.logs; from app import compiled; "
        "print([name for name in compiled.MODULES if name in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=compiled.ROOT, check=True
    )
    assert said.stdout.strip() == "[]"
