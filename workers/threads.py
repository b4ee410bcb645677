"""Blocking calls beside the event loop, in threads that keep nobody from ending.

``asyncio.to_thread`` would do, but for the end: the loop waits for its executor's threads, so an engine told to stop
while it waits for the memory service would stay until that wait is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T], *, name: str) -> T:
    """The result of ``call``, or what it raised. When cancelled, the call runs on and its outcome is dropped."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    threading.Thread(target=_outcome, args=(call, loop, outcome), name=name, daemon=True).start()
    return await outcome


def _outcome(call: Callable[[], T], loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[T]) -> None:
    """Call, and have the loop told what came of it."""
    result, failure = None, None
    try:
        result = call()
    except BaseException as error:
        failure = error

    def deliver() -> None:
        if outcome.done():
            return
        if failure is not None:
            outcome.set_exception(failure)
        else:
            outcome.set_result(cast(T, result))

    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(deliver)


async def interruptible(call: Callable[[Callable[[], bool]], T], *, name: str) -> T:
    """As ``in_daemon_thread``; ``call`` is given a function that says whether it is cancelled. A cancellation is passed
    on to it in this way, and raised here when it has come to an end: nothing of it runs any more then."""
    stop = threading.Event()
    work = asyncio.ensure_future(in_daemon_thread(lambda: call(stop.is_set), name=name))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({work})
        raise
    finally:
        work.cancel()


class OwnThread:
    """A thread that calls what it is given, one after the other, for as long as its owner wants.

    Whoever starts processes in a thread needs one that lasts: a child that asked the kernel to die with its parent dies
    with the *thread* that made it (``workers.lifeline``).
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, call: Callable[[], T]) -> T:
        """The result of ``call``, or what it raised. When cancelled, the call runs on and its outcome is dropped."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._calls.put(partial(_outcome, call, loop, outcome))
        return await outcome

    def end(self) -> None:
        """It ends once it has done what it was given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
