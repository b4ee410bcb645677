"""Large compressed bodies are decoded here, in threads of their own: the event loop goes on, and so do the threads that
files and names are looked up in. Each body has a deadline, and stops when nobody wants it any more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final, Self

from app.each import each
from app.intake.content_coding import Decoding
from app.openai.errors import GatewayError, body_not_decoded

THREADS: Final = 2
LIMIT_SECONDS: Final = 20.0
"""From the hand-over to the end. A body of 32 MiB takes a few tenths of a second."""


class Decoder:
    """One body's. ``then`` is called once, later, with what went wrong, or ``None``."""

    __slots__ = ("_decoders", "_future", "_reason", "_then", "_timer", "decoding")

    def __init__(
        self,
        decoders: Decoders,
        executor: ThreadPoolExecutor,
        decoding: Decoding,
        then: Callable[[BaseException | None], None],
    ) -> None:
        self.decoding = decoding
        self._decoders = decoders
        self._then = then
        self._reason: BaseException | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LIMIT_SECONDS, self.stop, body_not_decoded(LIMIT_SECONDS))
        self._future = loop.run_in_executor(executor, decoding.run, sys.maxsize)
        self._future.add_done_callback(self._done)

    def stop(self, reason: BaseException | None = None) -> None:
        """Nobody wants it, for this reason; the thread notices with the next piece."""
        if not self._future.done():
            self._reason = reason or asyncio.CancelledError()
            self.decoding.stop()
            self._future.cancel()

    def _done(self, future: asyncio.Future[bool]) -> None:
        self._timer.cancel()
        self._decoders.forget(self)
        self._then(self._reason if future.cancelled() else future.exception())


class Decoders:
    """Use as ``with``, and not again."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="decoder")
        self._running: set[Decoder] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for decoder in list(self._running):
            decoder.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def start(self, decoding: Decoding, then: Callable[[BaseException | None], None]) -> Decoder:
        decoder = Decoder(self, self._executor, decoding, then)
        self._running.add(decoder)
        return decoder

    def forget(self, decoder: Decoder) -> None:
        self._running.discard(decoder)

    def interrupt_all(self, error: GatewayError) -> int:
        """End all with this error; returns how many there were."""
        running = list(self._running)
        each([partial(decoder.stop, error) for decoder in running])
        return len(running)
