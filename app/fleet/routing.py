"""Which worker takes the next request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class RoundRobinRouter:
    """Candidates in turn, each group of requests with its own turn.

    A group is a model: with one turn for all, two models asked for alternately would each always meet the same worker.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def select(self, candidates: Sequence[T], accepts: Callable[[T], bool], *, group: str = "") -> T | None:
        """The next candidate that is accepted, or ``None``. ``group`` should come from a bounded set."""
        count = len(candidates)
        turn = self._turns.get(group, 0)
        for step in range(count):
            candidate = candidates[(turn + step) % count]
            if accepts(candidate):
                self._turns[group] = (turn + step + 1) % count
                return candidate
        return None
