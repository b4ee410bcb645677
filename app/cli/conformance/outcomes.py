"""[P] What came of each check, its line in the table, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

MAX_REASON_CHARS: Final = 400

EXIT_KEPT: Final = 0
EXIT_BROKEN: Final = 1
"""At least one promise is broken. That the engine cannot be tried at all is ``ExitCode.BAD_CONFIGURATION``."""


class Outcome(StrEnum):
    PASS = "pass"  # noqa: S105 - a word
    FAIL = "fail"
    SKIP = "skip"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``reason`` says why it failed or was left out, and for one that passed what is worth knowing."""

    check: str
    promise: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that is said of one engine."""

    engine: str
    target: str
    package: str
    caveat: str
    memory_service: bool
    results: Sequence[Result]

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome is outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        return EXIT_BROKEN if self.count(Outcome.FAIL) else EXIT_KEPT


class Failed(Exception):
    """The promise is broken; the message says how, without a full stop."""


class Skipped(Exception):
    """The check says nothing here; the message says why."""


def short(reason: str) -> str:
    """On one line, and not endless: an engine's exceptions may say a lot."""
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 1]}…"


def row(result: Result, *, width: int) -> str:
    """One line for a person; ``width``: of the longest name."""
    said = f"{result.promise}: {result.reason}" if result.reason else result.promise
    return f"{result.outcome:<4}  {result.check:<{width}}  {said}"


def summary(report: Report) -> str:
    """The last line."""
    counts = ", ".join(f"{report.count(outcome)} {word}" for outcome, word in _WORDS)
    where = "over a memory service" if report.memory_service else "without a memory service"
    return f"{report.engine} ({report.target}), {where}: {counts}"


_WORDS: Final = ((Outcome.PASS, "passed"), (Outcome.FAIL, "failed"), (Outcome.SKIP, "skipped"))
