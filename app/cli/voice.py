"""What ``hotspare up`` says while it runs: events with their time of day, and its children's warnings and errors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from app.cli.children import Child
from app.cli.loglines import LastWords, Level, cut_off_in, is_loud, level_of
from app.cli.screen import Screen

LOG_LINES_PER_LOOK: Final = 20
"""More warnings at once than this are left to the log file."""
_STYLES: Final = {Level.WARNING: "yellow", Level.ERROR: "red"}


class Voice:
    """Speaks through a screen, and reads the children's logs along."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._words: dict[str, LastWords] = {}
        self.cut_off = 0
        """Requests that the logs read so far say were ended before they were done."""

    def say(self, text: str, *, at: float | None = None, style: str = "") -> None:
        """One event; ``at`` is when it happened, in seconds of the monotonic clock, or None for now."""
        ago = time.monotonic() - at if at is not None else 0.0
        moment = time.time() - ago
        clock = time.strftime("%H:%M:%S", time.localtime(moment))
        self._screen.say(f"{clock}.{int(moment % 1 * 1000):03d} {text}", style=style)

    def read_logs(self, children: Iterable[Child]) -> None:
        """Repeat what is new and loud in the children's logs; lines beyond ``LOG_LINES_PER_LOOK`` are only counted."""
        for child in children:
            lines = child.new_lines()
            self._words.setdefault(child.name, LastWords()).feed(lines)
            self.cut_off += sum(map(cut_off_in, lines))
            loud = [line for line in lines if is_loud(line)]
            for line in loud[:LOG_LINES_PER_LOOK]:
                self._screen.say(f"{child.name} | {line}", style=_STYLES[level_of(line)])
            if len(loud) > LOG_LINES_PER_LOOK:
                self._screen.say(f"{child.name} | ... {len(loud) - LOG_LINES_PER_LOOK} more in {child.log}")

    def last_words(self, child: Child) -> str:
        """The sentence in its log that best explains why it ended."""
        return self._words.get(child.name, LastWords()).sentence
