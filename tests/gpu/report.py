"""What is found on a GPU: lines that the processes of a run say, and the tables that are made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from msgspec import Struct


class Fact(Struct, tag="fact", frozen=True):
    """`relied` is what the code needs `found` to be, empty where nothing depends on it."""

    question: str
    found: str
    relied: str = ""

    @property
    def holds(self) -> bool:
        """A reason may follow what is relied on: "refused: CUDA_ERROR_INVALID_VALUE"."""
        return not self.relied or self.found == self.relied or self.found.startswith(f"{self.relied}: ")


class Duration(Struct, tag="duration", frozen=True):
    what: str
    milliseconds: float


class Calls(Struct, tag="calls", frozen=True):
    """`microseconds` of one call each, for a chunk of `chunk_bytes`; the mean over `count` chunks."""

    chunk_bytes: int
    count: int
    microseconds: dict[str, float]


Line = Fact | Duration | Calls


def emit(line: Line) -> None:
    """From a case's process. At once, so that what is known before a crash is not lost with it."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def decode(line: str) -> Line:
    """Raises msgspec.DecodeError for what `emit` has not written."""
    return msgspec.json.decode(line, type=Line)


class Report:
    """Everything found so far, in the order it came. Kept in `file` as well, if one is given: what was found is there
    even if the run is killed."""

    def __init__(self, title: str, file: Path | None) -> None:
        self._title = title
        self._file = file
        self._lines: list[Line] = []
        self._notes: list[str] = []

    def add(self, line: Line) -> None:
        self._lines.append(line)
        self._write()

    def note(self, sentence: str) -> None:
        """Something that the reader of the tables must know."""
        self._notes.append(sentence)
        self._write()

    def render(self) -> str:
        """Markdown."""
        facts = [line for line in self._lines if isinstance(line, Fact)]
        durations = [line for line in self._lines if isinstance(line, Duration)]
        calls = [line for line in self._lines if isinstance(line, Calls)]
        parts = [self._title, *self._notes]
        if facts:
            rows = [[fact.question, _verdict(fact), fact.relied or "nothing"] for fact in facts]
            parts.append(_table(["fact", "found", "relied on"], "lll", rows))
        if durations:
            rows = [[duration.what, f"{duration.milliseconds:,.1f} ms"] for duration in durations]
            parts.append(_table(["duration", "time"], "lr", rows))
        if calls:
            names = list(dict.fromkeys(name for line in calls for name in line.microseconds))
            rows = [
                [size(line.chunk_bytes), str(line.count), size(line.chunk_bytes * line.count)]
                + [f"{line.microseconds[name]:,.1f}" if name in line.microseconds else "" for name in names]
                for line in calls
            ]
            parts.append("Microseconds a chunk:")
            parts.append(_table(["chunk", "chunks", "together", *names], "rrr" + "r" * len(names), rows))
        return "\n\n".join(parts) + "\n"

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(self.render())


def size(size_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} bytes"


def _verdict(fact: Fact) -> str:
    return fact.found if fact.holds else f"**{fact.found}**"


def _table(heads: list[str], align: str, rows: list[list[str]]) -> str:
    rule = ["---:" if side == "r" else "---" for side in align]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rule, *cells])
