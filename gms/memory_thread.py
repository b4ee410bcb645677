"""The one thread that the backend's calls run on, one after the other.

That order is what makes it safe to destroy pages while a call on them is still under way: the destruction queues up
behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from gms.backends.base import DeviceError, ForeignPagesError, OutOfMemoryError, StillMappedError
from gms.protocol import ErrorCode, GmsError

log: Final = logging.getLogger("gms")

_TOLD: Final = (DeviceError, ForeignPagesError, OutOfMemoryError, StillMappedError)
"""What a backend's calls may raise; anything else is a mistake."""

A = ParamSpec("A")
R = TypeVar("R")


class MemoryThread:
    """`fail` is told, once and on that thread, of a device that cannot be gone on with."""

    def __init__(self, fail: Callable[[DeviceError], None]) -> None:
        self._fail = fail
        self._failed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gms-memory")

    async def call(self, function: Callable[A, R], *arguments: A.args, **named: A.kwargs) -> R:
        """`submit` and `result` in one."""
        return await self.result(self.submit(function, *arguments, **named))

    def submit(self, function: Callable[A, R], *arguments: A.args, **named: A.kwargs) -> ThreadFuture[R]:
        """Queues the call up; its failure is told of or logged even if nobody waits for it."""
        pending = self._thread.submit(function, *arguments, **named)
        pending.add_done_callback(self._watch)
        return pending

    async def result(self, pending: ThreadFuture[R]) -> R:
        """Waits on the event loop. Cancelled, it takes the call back if it has not begun.

        Raises GmsError(internal) for a device that failed and for a mistake, and what the backend's calls raise else.
        """
        try:
            return await asyncio.wrap_future(pending)
        except DeviceError as error:
            raise GmsError(ErrorCode.INTERNAL, f"{error} The memory service ends; it is to be restarted.") from error
        except _TOLD:
            raise
        except Exception as error:
            message = f"A call on the memory failed ({type(error).__name__}: {error}); see the service's log."
            raise GmsError(ErrorCode.INTERNAL, message) from error

    def close(self) -> None:
        """Waits for all calls."""
        self._thread.shutdown(wait=True)

    def _watch(self, done: ThreadFuture[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is None:
            return
        if not isinstance(error, _TOLD):
            log.error("a call on the memory failed", exc_info=error)
        elif isinstance(error, DeviceError) and not self._failed:
            self._failed = True
            self._fail(error)
