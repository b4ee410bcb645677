"""SIGTERM ends a measurement as Ctrl-C does: what it started ends, and its folder goes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_EXIT: Final = 128 + signal.SIGTERM


class _ToldToEnd(Exception):
    """By SIGTERM, and everything has ended."""


def sigterm_unwinds() -> None:
    """For a measurement without an event loop."""

    def end(*_: object) -> None:
        sys.exit(_EXIT)

    signal.signal(signal.SIGTERM, end)


def run(measurement: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``. The first SIGTERM cancels the measurement, others change nothing: its end has deadlines."""
    try:
        return asyncio.run(_cancelled_by_sigterm(measurement))
    except _ToldToEnd:
        sys.exit(_EXIT)


async def _cancelled_by_sigterm(measurement: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(measurement)
    told = False

    def end() -> None:
        nonlocal told
        if not told:
            told = True
            task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await task
    except asyncio.CancelledError:
        if told and task.cancelled():
            raise _ToldToEnd from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
