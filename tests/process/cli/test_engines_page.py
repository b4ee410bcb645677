"""docs/engines.md: its engine runs, its table names our engines, and its members are the Protocol's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.cli.test_conformance import environment
from workers.engines import catalogue, fit

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "engines.md").read_text()


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """The folder of the page's engine, installed by an entry point."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "echo_engine.py").write_text(code)
    (points,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    info = tmp_path / "echo_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        points.replace('[project.entry-points."hotspare.engines"]', "[hotspare.engines]").replace('"', "")
    )
    return tmp_path


def hotspare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli.main", *arguments],
        cwd=ROOT,
        env=environment(PYTHONPATH=f"{ROOT}:{folder}"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("name", ["echo", "echo_engine:Echo"])
def test_the_engine_of_the_page_keeps_all_promises(echo: Path, name: str) -> None:
    done = hotspare(echo, "conformance", "--engine", name, "--no-gms")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [row.split()[1] for row in done.stdout.splitlines() if row.startswith("skip")]
    assert skipped == ["self-test-cancelled", "notes", "resume", "framed", "old-epoch"]
    assert done.stdout.endswith("warning: it only says what it was asked\n")


def test_the_list_names_it_and_its_caveat(echo: Path) -> None:
    done = hotspare(echo, "engines")
    assert "echo    echo_engine:Echo (echo-engine): it only says what it was asked" in done.stdout, done.stdout
    for name in catalogue.OURS:
        assert f"\n{name} " in f"\n{done.stdout}"
    assert done.stdout.count("was not run on hardware") == 2


def test_the_page_has_every_member_of_the_protocol() -> None:
    for name in (*fit.methods(), *fit.facts()):
        assert re.search(rf"^\| .*`(async )?{name}\b", PAGE, re.MULTILINE), name


def test_the_page_has_every_engine_of_ours() -> None:
    (names,) = re.findall(r"^\| `--engine` \|(.*)\|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", names)) == set(catalogue.OURS)
