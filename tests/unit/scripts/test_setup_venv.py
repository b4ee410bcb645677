"""What of .venv is installed again, and what is left alone under those who run from it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Sets up, and says what was installed: the groups of each time."""
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / ".hotspare-setup")

    def setup(key: str, *groups: str, new: bool = False, fails: bool = False) -> list[list[str]]:
        installed: list[list[str]] = []

        def install(missing: list[str]) -> None:
            if fails:
                raise module.SetupError("no network")
            installed.append(list(missing))

        monkeypatch.setattr(module, "check_python", lambda _: None)
        monkeypatch.setattr(module, "create_venv", lambda: new)
        monkeypatch.setattr(module, "install_uv", lambda: None)
        monkeypatch.setattr(module, "install_project", lambda: None)
        monkeypatch.setattr(module, "install_groups", install)
        module.run(key, list(groups))
        return installed

    return setup


def test_only_what_is_missing_is_installed(run: Run) -> None:
    assert run("k1", "core", "vllm", new=True) == [["core", "vllm"]]
    assert run("k1", "core", "vllm", "test") == [["test"]]
    assert run("k1", "core", "vllm") == []
    assert run("k1", "core", "vllm", "test") == []


def test_after_a_change_everything_is_installed(run: Run) -> None:
    run("k1", "core", "vllm", "test", new=True)
    assert run("k2", "core", "vllm") == [["core", "vllm"]]
    assert run("k2", "core", "vllm", "test") == [["test"]]
    assert run("k2", "core", "vllm", "test", new=True) == [["core", "vllm", "test"]]


def test_what_was_cut_short_is_done_again(run: Run) -> None:
    run("k1", "core", new=True)
    with pytest.raises(Exception, match="no network"):
        run("k1", "core", "test", fails=True)
    assert run("k1", "core", "test") == [["core", "test"]]
