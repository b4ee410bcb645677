"""How many requests are in flight, and whether one more is taken.

A token is held from admission to the last byte, for HTTP bodies now and for sessions later. The drain waits on it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from app.lifecycle import LifecycleMachine
from app.openai.errors import draining, overloaded
from app.relay.service_rate import Appointments


class InflightToken:
    """One request in flight. Use as a context manager; releasing twice is harmless."""

    __slots__ = ("_controller",)

    def __init__(self, controller: AdmissionController) -> None:
        self._controller: AdmissionController | None = controller

    def release(self) -> None:
        controller, self._controller = self._controller, None
        if controller is not None:
            controller._released()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AdmissionController:
    """``per_second``: how many requests end in a second, as far as that is known."""

    def __init__(
        self, lifecycle: LifecycleMachine, *, limit: int, per_second: Callable[[], float] | None = None
    ) -> None:
        self._lifecycle = lifecycle
        self._limit = limit
        self._per_second = per_second
        self._appointments = Appointments()
        self._inflight = 0
        self._idle: list[asyncio.Future[None]] = []

    @property
    def inflight(self) -> int:
        return self._inflight

    def admit(self) -> InflightToken:
        """Raises:
        GatewayError: 503 ``draining``, or 429 ``overloaded``.
        """
        if not self._lifecycle.admits:
            raise draining()
        if self._inflight >= self._limit:
            raise overloaded(self._limit, retry_after=self._retry_after())
        self._inflight += 1
        return InflightToken(self)

    def _retry_after(self) -> float:
        rate = 0.0 if self._per_second is None else self._per_second()
        return self._appointments.make(time.monotonic(), rate, random.random())  # noqa: S311

    async def wait_idle(self) -> None:
        """Return once nothing is in flight. The caller sets the deadline."""
        while self._inflight:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(future)
            try:
                await future
            finally:
                self._idle.remove(future)

    def _released(self) -> None:
        self._inflight -= 1
        if not self._inflight:
            for future in self._idle:
                if not future.done():
                    future.set_result(None)
