"""What the repository's files are, whatever way they have come here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", "app", "docs", "gms", "helm", "loadtest", "requirements", "scripts", "tests", "workers")


def entries() -> Iterator[Path]:
    for folder in FOLDERS:
        for place, folders, files in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (Path(place) / name for name in (*folders, *files))


def test_nothing_is_a_link_or_what_is_left_of_one() -> None:
    """Some ways of passing a repository on make a file of a symbolic link, which has the link's target as its text."""
    found = [path for path in entries() if path.is_symlink() or was_a_link(path)]
    assert found == []


def was_a_link(path: Path) -> bool:
    if not path.is_file() or not 0 < path.stat().st_size < 200:
        return False
    text = path.read_text(errors="replace")
    return "\n" not in text and (path.parent / text).exists()


def test_what_is_left_of_a_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").write_text("../" + tmp_path.name + "/here")
    (tmp_path / "note").write_text("a word")
    assert [was_a_link(tmp_path / name) for name in ("link", "note", "here")] == [True, False, False]
