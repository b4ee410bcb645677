"""Blocking calls beside the event loop, in threads that keep nobody from ending.

``asyncio.to_thread`` would do, but for the end: the loop waits for its executor's threads, so an engine told to stop
while it waits for the memory service would stay until that wait is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T], *, name: str) -> T:
    """The result of ``call``, or what it raised. When cancelled, the call runs on and its outcome is dropped."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, failure: BaseException | None) -> None:
        if outcome.done():
            return
        if failure is not None:
            outcome.set_exception(failure)
        else:
            outcome.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
