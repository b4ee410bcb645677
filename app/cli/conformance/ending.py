"""Checks of ``shutdown``: at any time, more than once, and with nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import httpx

from app.cli.conformance.leftovers import in_words
from app.cli.conformance.outcomes import Failed
from app.cli.conformance.subject import State, Subject
from workers.engine import EngineDeadError

INTERRUPT_SECONDS: Final = 0.05


async def shutdown(subject: Subject) -> None:
    await subject.within("shutdown()", subject.engine.shutdown(), seconds=subject.settings.engine_shutdown_seconds)
    subject.state = State.ENDED


async def shutdown_twice(subject: Subject) -> None:
    await subject.shutdown()


async def health_after(subject: Subject) -> None:
    try:
        await subject.within("check_health()", subject.engine.check_health())
    except EngineDeadError:
        return
    except Failed:
        raise
    except Exception as error:
        raise Failed(f"check_health() of a dead engine raises {type(error).__name__}, not EngineDeadError") from None
    raise Failed("check_health() says that an engine is well that was shut down")


async def nothing_left(subject: Subject) -> str:
    pool = await subject.kv_pool()
    if pool is not None and pool.leases:
        raise Failed("the memory service has a lease on its KV pages after shutdown()")
    known = getattr(type(subject.engine), "leaves", ())
    left = await subject.nothing_since(subject.before, "shutdown() leaves", but=known)
    return f"but what the engine says that it leaves: {in_words(left)}" if left else ""


async def shutdown_new(subject: Subject) -> None:
    await subject.shutdown()
    await subject.shutdown()


async def shutdown_while_initializing(subject: Subject) -> str:
    initializing = asyncio.ensure_future(subject.initialize())
    await asyncio.wait({initializing}, timeout=INTERRUPT_SECONDS)
    done = initializing.done()
    initializing.cancel()
    await asyncio.wait({initializing})
    error = None if initializing.cancelled() else initializing.exception()
    await subject.shutdown()
    await subject.shutdown()
    if error is not None:
        return f"initialize(){'' if done else ' that was cancelled'} ended with {type(error).__name__}: {error}"
    return "it was initialised already" if done else ""


async def shutdown_with_requests(subject: Subject) -> None:
    async with subject.client() as client, subject.running_stream(client) as rest:

        async def read() -> None:
            with contextlib.suppress(httpx.TransportError):
                async for _ in rest:
                    pass

        reading = asyncio.ensure_future(read())
        try:
            await subject.shutdown()
            ended = asyncio.shield(reading)
            await subject.within("the rest of a stream after shutdown()", ended, seconds=subject.settle_seconds)
        finally:
            reading.cancel()
            await asyncio.wait({reading})
