"""Where ``hotspare up`` speaks: a live display on a terminal, plain lines anywhere else.

Nobody need listen. A pipe that is full, or closed, and a terminal that was stopped, must not keep ``up`` from draining:
everything is written by a thread, and dropped when it has nowhere to go.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Final, Protocol, TextIO, cast

from gms.legible import on_terminal
from workers.children import LogSink

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

    def close(self) -> None:
        """Nothing follows. Waits a moment for who still reads."""


class Outlet(io.TextIOBase):
    """A text stream that never makes its writer wait."""

    def __init__(self, stream: TextIO) -> None:
        """``stream`` stays the caller's; what it has buffered is written first."""
        with contextlib.suppress(OSError):
            stream.flush()
        self._sink = LogSink(stream.fileno())
        self._encoding = stream.encoding

    def write(self, text: str) -> int:
        self._sink.offer(text.encode(self._encoding, "replace"))
        return len(text)

    def close(self) -> None:
        if not self.closed:
            self._sink.close()
        super().close()


def open_screen(stream: TextIO | None = None) -> Screen:
    """The screen that fits ``stream`` (stdout, if this process has one)."""
    stream = stream if stream is not None else sys.stdout
    if stream is None:  # `hotspare up >&-`
        return PlainScreen(_Nowhere())
    return LiveScreen(Outlet(stream)) if stream.isatty() else PlainScreen(Outlet(stream))


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class PlainScreen:
    """One line for each step that is done."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream
        self._told: set[str] = set()

    def show(self, board: Board, *, now: float) -> None:
        for step in board.steps:
            if step.ended is not None and step.name not in self._told:
                self._told.add(step.name)
                self.say(f"{step.name}: done in {step.ended - step.began:.2f} s")

    def say(self, text: str, *, style: str = "") -> None:
        self._stream.write(f"{text}\n")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._stream.close()


class LiveScreen:
    """Steps with running clocks, drawn when told to: no thread of its own."""

    def __init__(self, outlet: Outlet) -> None:
        from rich.console import Console
        from rich.live import Live

        self._outlet = outlet
        self._console = Console(file=cast(TextIO, outlet), force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, board: Board, *, now: float) -> None:
        if self._live.is_started:
            self._live.update(_table(board.steps, now), refresh=True)

    def say(self, text: str, *, style: str = "") -> None:
        # soft_wrap: a command that is to be copied must not get line breaks.
        self._console.print(on_terminal(text), style=style or None, markup=False, soft_wrap=True)

    def finish(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def close(self) -> None:
        self.finish()
        self._outlet.close()


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
