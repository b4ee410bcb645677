"""The gateway's layers hold because a wrong import is found, and so is a part that nobody gave a place."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WRONG = {
    "app/fleet/room.py": "from app.relay.relay import Relay",
    "app/openai/sse.py": "import app.relay.headers",
    "app/intake/arrival.py": "from app.clients.direct import DirectCycle",
    "app/processes/supervisor.py": "from app.serve import serve",
    "app/each.py": "from app.exit_codes import DRAINED",
}
"""Module → a line that it must not have: upwards, and to one beside it."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the linter looks at, to be spoiled."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "app", tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("workers", "gms"):
        (tmp_path / package).symlink_to(ROOT / package)
    return tmp_path


def test_a_wrong_import_is_found(tree: Path) -> None:
    for path, line in WRONG.items():
        with (tree / path).open("a") as file:
            file.write(f"\n{line}\n")
    code, said = look(tree)
    assert code == 1
    found = [line for line in said.splitlines() if line.startswith("- ")]
    for path in WRONG:
        module = path.removesuffix(".py").replace("/", ".")
        assert [line for line in found if line.startswith(f"- {module} -> ")], (module, said)
    assert len(found) == len(WRONG)


def test_a_part_without_a_place_is_found(tree: Path) -> None:
    (tree / "app/stranger.py").write_text('"""Nobody\'s."""\n')
    code, said = look(tree)
    assert code == 1
    assert "- app.stranger" in said


def test_as_it_is_all_is_well(tree: Path) -> None:
    assert look(tree)[0] == 0


def test_the_docs_have_the_same_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "gateway-layers")
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The gateway's parts")[2].partition("\n## ")[0]
    named = [re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in table.splitlines() if row.startswith("| `")]
    assert [part for row in named for part in row] == [part for layer in layers for part in layer.split(" | ")]


def look(tree: Path) -> tuple[int, str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--contract", "gateway-layers"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr
