"""Threads that decode: they are stopped, they are late, and they hold nobody up at the end."""

from __future__ import annotations

import asyncio
import threading
import zlib

import pytest

from app.intake import decoders as module
from app.intake.content_coding import Decoding
from app.intake.decoders import THREADS, Decoders
from app.openai.errors import GatewayError, drain_overran


class Held(Decoding):
    """Stands still until it is told to stop, as one does that never comes to its end."""

    def __init__(self) -> None:
        super().__init__("deflate", zlib.compress(b"x"), 100)
        self.begun = threading.Event()
        self._told = threading.Event()
        self.ended = threading.Event()

    def stop(self) -> None:
        super().stop()
        self._told.set()

    def run(self, budget_bytes: int) -> bool:
        self.begun.set()
        self._told.wait(10)
        self.ended.set()
        return super().run(budget_bytes)


class Heard:
    def __init__(self) -> None:
        self._future: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BaseException | None) -> None:
        self._future.set_result(error)  # a second call would raise

    async def wait(self) -> BaseException | None:
        async with asyncio.timeout(5):
            return await self._future


async def began(held: Held) -> None:
    assert await asyncio.to_thread(held.begun.wait, 5)


async def test_a_body() -> None:
    with Decoders() as decoders:
        decoding, heard = Decoding("deflate", zlib.compress(b"x" * 1000), 1000), Heard()
        decoders.start(decoding, heard)
        assert await heard.wait() is None
        assert decoding.body == b"x" * 1000
        assert decoders.interrupt_all(drain_overran()) == 0


async def test_what_is_wrong_is_told() -> None:
    with Decoders() as decoders:
        heard = Heard()
        decoders.start(Decoding("deflate", b"junk", 1000), heard)
        error = await heard.wait()
        assert isinstance(error, GatewayError)
        assert error.code == "invalid_content_encoding"


async def test_one_that_nobody_wants_leaves_its_thread() -> None:
    with Decoders() as decoders:
        held = [Held() for _ in range(THREADS + 1)]
        heard = [Heard() for _ in held]
        started = [decoders.start(*pair) for pair in zip(held, heard, strict=True)]
        await began(held[0])
        started[-1].stop()  # its turn has not come
        assert isinstance(await heard[-1].wait(), asyncio.CancelledError)
        for decoder, each in zip(started[:-1], heard[:-1], strict=True):
            decoder.stop()
            assert isinstance(await each.wait(), asyncio.CancelledError)
        for each in held[:-1]:
            assert await asyncio.to_thread(each.ended.wait, 5)
        assert not held[-1].begun.is_set()
        last = Heard()
        decoders.start(Decoding("deflate", zlib.compress(b"x"), 1000), last)
        assert await last.wait() is None


async def test_the_end_of_the_drain_comes_for_all() -> None:
    with Decoders() as decoders:
        heard = [Heard() for _ in range(THREADS + 3)]
        for each in heard:
            decoders.start(Held(), each)
        assert decoders.interrupt_all(drain_overran()) == len(heard)
        for each in heard:
            error = await each.wait()
            assert isinstance(error, GatewayError)
            assert error.code == drain_overran().code


async def test_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.01)
    with Decoders() as decoders:
        heard = Heard()
        decoders.start(Held(), heard)
        error = await heard.wait()
        assert isinstance(error, GatewayError)
        assert (error.status, error.code) == (408, "request_timeout")


async def test_the_end_waits_for_none() -> None:
    held = Held()
    with Decoders() as decoders:
        heard = Heard()
        decoders.start(held, heard)
        await began(held)
    assert isinstance(await heard.wait(), asyncio.CancelledError)
    assert await asyncio.to_thread(held.ended.wait, 5)
