"""Writes the tables of helm/hotspare/README.md from the comments in its values.yaml.

    .venv/bin/python scripts/chart_doc.py

A row is a value with its comment; what has commented values below it is a section. A test fails when the page is not
what this would write, and this fails when a value has no comment.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "hotspare"
PAGE = CHART / "README.md"
BEGIN = "<!-- Written by scripts/chart_doc.py from values.yaml; a test fails when it is stale. -->\n"
_KEY = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z][A-Za-z0-9]*):(?P<rest>.*)")


class CommentMissing(Exception):
    """A value that nobody could understand."""


@dataclass
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    comment: str
    default: Any
    below: list[Value] = field(default_factory=list)

    @property
    def is_section(self) -> bool:
        return any(value.comment for value in self.below) or any(value.below for value in self.below)


def read(text: str) -> list[Value]:
    """The top-level values, with all below them."""
    defaults = yaml.safe_load(text)
    top: list[Value] = []
    open_ones: list[tuple[int, Value]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        match = _KEY.fullmatch(line)
        if match is None:
            comment = []
            continue
        indent = len(match["indent"])
        while open_ones and open_ones[-1][0] >= indent:
            open_ones.pop()
        parent = open_ones[-1][1] if open_ones else None
        path = (*(parent.path if parent else ()), match["name"])
        value = Value(path, " ".join(comment), _at(defaults, path))
        (parent.below if parent else top).append(value)
        open_ones.append((indent, value))
        comment = []
    return top


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        values = values[name]
    return values


def page(values: str, before: str) -> str:
    """`before`, and the tables."""
    parts = [before, BEGIN]
    single = [value for value in read(values) if not value.is_section]
    parts.append(_table("General", "", single))
    for value in read(values):
        if value.is_section:
            parts.append(_table(f"`{value.path[0]}`", value.comment, list(_leaves(value))))
    return "\n".join(parts)


def _leaves(value: Value) -> Iterator[Value]:
    for below in value.below:
        if below.is_section:
            yield from _leaves(below)
        else:
            yield below


def _table(title: str, text: str, rows: list[Value]) -> str:
    lines = [f"### {title}", "", *([text, ""] if text else []), "| value | default | meaning |", "| --- | --- | --- |"]
    for row in rows:
        if not row.comment:
            raise CommentMissing(f"{'.'.join(row.path)} has no comment in values.yaml")
        shown = row.default if isinstance(row.default, str) else json.dumps(row.default)
        default = f"`{shown}`" if shown else '`""`'
        lines.append(f"| `{'.'.join(row.path)}` | {default} | {row.comment.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])


def current_page() -> str:
    """What README.md should be: its own words, up to the mark, and the tables."""
    before = PAGE.read_text().partition(BEGIN)[0].removesuffix("\n")
    return page((CHART / "values.yaml").read_text(), before)


def main() -> int:
    try:
        PAGE.write_text(current_page())
    except CommentMissing as error:
        print(f"chart_doc: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
