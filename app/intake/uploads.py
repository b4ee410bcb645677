"""Bodies that are still being sent: each has a deadline, must make progress, and the end of a drain comes for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from app.each import each
from app.openai.errors import GatewayError, body_stalled, body_too_slow

LEAST_BYTES: Final = 1024
"""Of a body, in each time of ``stall_seconds``: a client that trickles holds a place among those in flight."""


class Upload:
    """A body that somebody waits for without a coroutine. :meth:`end` it when it is there, or not wanted."""

    __slots__ = ("_before", "_ends", "_loop", "_received", "_refuse", "_refused", "_seconds", "_timer", "_uploads")

    def __init__(
        self, uploads: Uploads, seconds: float, received: Callable[[], int], refuse: Callable[[GatewayError], None]
    ) -> None:
        self._refuse = refuse
        self._refused = False
        self._uploads = uploads
        self._seconds = seconds
        self._received = received
        self._before = received()
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + seconds
        self._timer = self._loop.call_later(min(seconds, uploads.stall_seconds), self._look)

    def refuse(self, error: GatewayError) -> None:
        """Once: in one turn of the loop, its time may be over and a drain's."""
        if not self._refused:
            self._refused = True
            self._refuse(error)

    def end(self) -> None:
        self._timer.cancel()
        self._uploads.forget(self)

    def _look(self) -> None:
        left, received = self._ends - self._loop.time(), self._received()
        if left <= 0:
            self.refuse(body_too_slow(self._seconds))
        elif received - self._before < LEAST_BYTES:
            self.refuse(body_stalled(self._uploads.stall_seconds, LEAST_BYTES))
        else:
            self._before = received
            self._timer = self._loop.call_later(min(left, self._uploads.stall_seconds), self._look)


class Uploads:
    def __init__(self, *, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self._expected: set[Upload] = set()
        self._over: GatewayError | None = None

    def expect(self, seconds: float, received: Callable[[], int], refuse: Callable[[GatewayError], None]) -> Upload:
        """Wait for a body; ``received`` says how many bytes of it have come. ``refuse`` is called, later, if it takes
        too long, or too little of it comes, or the drain's time is over first."""
        upload = Upload(self, seconds, received, refuse)
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
    async def within(self, seconds: float, received: Callable[[], int]) -> AsyncIterator[None]:
        """The same for a coroutine: reading a body happens inside.

        Raises:
            GatewayError: why the body is not to be had.
        """
        refusal: GatewayError | None = None

        def refuse(error: GatewayError) -> None:
            nonlocal refusal
            refusal = error
            deadline.reschedule(0)

        try:
            async with asyncio.timeout(None) as deadline:
                upload = self.expect(seconds, received, refuse)
                try:
                    yield
                finally:
                    upload.end()
        except TimeoutError:
            if refusal is None:
                raise
            raise refusal from None

    def interrupt_all(self, error: GatewayError) -> int:
        """End every upload with this error, those too that have yet to begin; returns how many were running."""
        self._over = error
        expected = list(self._expected)
        each([partial(self._interrupt, upload, error) for upload in expected])
        return len(expected)
