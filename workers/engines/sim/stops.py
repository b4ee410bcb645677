"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until a stop string appears in it, and never a part of one.

    As much text as could be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take text in, and return what may be shown. Nothing any more once ``stopped``."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text held back, once no more will come."""
        shown, self._held = self._held, ""
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
