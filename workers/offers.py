"""Spares are asked whether they would take over: all at once, while the engine that asks serves on.

One yes is enough, and whoever is silent then has little time left. Without one, a spare that was not run for a moment
(on a busy machine) is waited for, since a hand-over that is not made costs more: an engine that was told to stop drains
then, and its pod takes no new requests meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def answers_of(
    asked: Sequence[Coroutine[Any, Any, T]], *, promises: Callable[[T], bool], seconds: float
) -> list[T | BaseException | None]:
    """What each of ``asked`` answers, or the exception that it ends with, in their order.

    Once somebody ``promises`` and ``seconds`` have passed, nobody is waited for any longer (None). Until then each
    question ends by itself.
    """
    tasks = [asyncio.ensure_future(one) for one in asked]
    enough_at = time.monotonic() + seconds
    waiting = set(tasks)
    try:
        while waiting:
            promised = any(promises(task.result()) for task in tasks if task.done() and not task.exception())
            left = max(0.0, enough_at - time.monotonic()) if promised else None
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        return [(task.exception() or task.result()) if task.done() else None for task in tasks]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
