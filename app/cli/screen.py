"""Where ``hotspare up`` speaks: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    from app.cli.stages import Board, Step


_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Screen(Protocol):
    """What ``up`` needs to be able to say."""

    def show(self, board: Board, *, now: float) -> None:
        """Bring the steps up to date."""

    def say(self, text: str, *, style: str = "") -> None:
        """One line that stays."""

    def finish(self) -> None:
        """The steps are over; lines may follow. Twice is fine."""


def open_screen(stream: TextIO | None = None) -> Screen:
    """The screen that fits ``stream`` (stdout)."""
    stream = stream if stream is not None else sys.stdout
    return LiveScreen() if stream.isatty() else PlainScreen(stream)


class PlainScreen:
    """One line for each step that is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told: set[str] = set()

    def show(self, board: Board, *, now: float) -> None:
        for step in board.steps:
            if step.ended is not None and step.name not in self._told:
                self._told.add(step.name)
                self.say(f"{step.name}: done in {step.ended - step.began:.2f} s")

    def say(self, text: str, *, style: str = "") -> None:
        print(text, file=self._stream, flush=True)

    def finish(self) -> None:
        pass


class LiveScreen:
    """Steps with running clocks, drawn when told to: no thread of its own."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, board: Board, *, now: float) -> None:
        if self._live.is_started:
            self._live.update(_table(board.steps, now), refresh=True)

    def say(self, text: str, *, style: str = "") -> None:
        # soft_wrap: a command that is to be copied must not get line breaks.
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def finish(self) -> None:
        if self._live.is_started:
            self._live.stop()


def _table(steps: tuple[Step, ...], now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for step in steps:
        done = step.ended is not None
        mark = Text("✓", style="green") if done else Text(_FRAMES[int(now * 10) % len(_FRAMES)], style="cyan")
        seconds = (step.ended if step.ended is not None else now) - step.began
        table.add_row(mark, step.name, Text(f"{seconds:.1f} s", style="dim"), Text(step.note, style="dim"))
    return table
