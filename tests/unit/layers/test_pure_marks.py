"""A mark that nobody enforces is a promise that nobody keeps."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_module_marked_pure_is_in_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["id"] == "pure")
    files = [path for package in ("app", "workers", "gms") for path in (ROOT / package).rglob("*.py")]
    marked = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("[P]")
    }
    assert "app.cli.news" in marked
    held = pure["source_modules"]
    assert [name for name in sorted(marked) if not name.startswith(tuple(held))] == []
