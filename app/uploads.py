"""Bodies that are still being sent: each has a deadline, and the end of a drain comes for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.openai.errors import GatewayError, body_too_slow


class Upload:
    """A body that somebody waits for without a coroutine. :meth:`end` it when it is there, or not wanted."""

    __slots__ = ("_seconds", "_timer", "_uploads", "refuse")

    def __init__(self, uploads: Uploads, seconds: float, refuse: Callable[[GatewayError], None]) -> None:
        self.refuse = refuse
        self._uploads = uploads
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._due)

    def end(self) -> None:
        self._timer.cancel()
        self._uploads.forget(self)

    def _due(self) -> None:
        self.refuse(body_too_slow(self._seconds))


class Uploads:
    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()
        self._expected: set[Upload] = set()
        self._over: GatewayError | None = None

    def expect(self, seconds: float, refuse: Callable[[GatewayError], None]) -> Upload:
        """Wait for a body; ``refuse`` is called, later, if it takes too long or the drain's time is over first."""
        upload = Upload(self, seconds, refuse)
        self._expected.add(upload)
        if self._over is not None:
            asyncio.get_running_loop().call_soon(self._interrupt, upload, self._over)
        return upload

    def forget(self, upload: Upload) -> None:
        self._expected.discard(upload)

    def _interrupt(self, upload: Upload, error: GatewayError) -> None:
        if upload in self._expected:
            upload.refuse(error)

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Reading a body happens inside.

        Raises:
            GatewayError: it took too long, or the drain's time is over.
        """
        try:
            async with asyncio.timeout(0 if self._over is not None else seconds) as deadline:
                self._running.add(deadline)
                try:
                    yield
                finally:
                    self._running.discard(deadline)
        except TimeoutError:
            raise self._over or body_too_slow(seconds) from None

    def interrupt_all(self, error: GatewayError) -> int:
        """End every upload with this error, those too that have yet to begin; returns how many were running."""
        self._over = error
        for deadline in self._running:
            deadline.reschedule(0)
        expected = list(self._expected)
        for upload in expected:
            self._interrupt(upload, error)
        return len(self._running) + len(expected)
