"""Something that is looked at four times a second, as long as one is inside."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Final, Self

PERIOD_SECONDS: Final = 0.25


class Regularly(ABC):
    """An async context manager: :meth:`look` is called on the event loop while inside."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @abstractmethod
    def look(self, late: float) -> None:
        """``late``: by how many seconds this call is late, never negative. A subclass says what is looked at."""

    def _arm(self) -> None:
        self._due = time.monotonic() + PERIOD_SECONDS
        self._timer = asyncio.get_running_loop().call_later(PERIOD_SECONDS, self._beat)

    def _beat(self) -> None:
        late = max(0.0, time.monotonic() - self._due)
        self._arm()
        self.look(late)
