"""How children are found, and that the quick commands stay quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.launch import PASSED_ON, module_command, safe_environment

ROOT = Path(__file__).parents[3]


def test_the_working_folders_packages_are_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert safe_environment({"PATH": "/bin"}) == {"PATH": "/bin", "PYTHONSAFEPATH": "1"}
    monkeypatch.chdir(ROOT)
    assert safe_environment({"PATH": "/bin"}) == {"PATH": "/bin"}


def test_each_command_is_a_module_of_this_interpreter() -> None:
    commands = {name: module_command(*passed.module)[1:] for name, passed in PASSED_ON.items()}
    assert commands == {
        "gateway": ["-m", "app"],
        "pod": ["-m", "workers", "pod"],
        "engine": ["-m", "workers", "engine"],
        "gms": ["-m", "gms"],
    }
    assert module_command("app")[0] == sys.executable


@pytest.mark.parametrize("module", ["app.cli.main", "app.cli.run_up", "app.cli.up_options", "app.cli.starter"])
def test_what_stands_before_the_children_imports_little(module: str) -> None:
    heavy = ("typer", "rich", "pydantic", "msgspec", "asyncio", "torch", "vllm")
    script = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
