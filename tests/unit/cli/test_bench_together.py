"""Tasks of a measurement: whichever of them fails, the measurement ends with its error, and at once."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from app.cli.bench import handover
from app.cli.bench.failover.load import OpenLoad
from app.cli.bench.load import SteadyLoad
from app.cli.bench.recovery.clients import Clients
from app.cli.bench.system import BenchError
from app.cli.bench.together import plain, together

LONG = 60.0
"""Longer than any test has: who waits for that has not heard of the error."""


async def fail(error: Exception) -> None:
    raise error


async def test_the_first_error_ends_the_others() -> None:
    others = []

    async def measure() -> None:
        async with together() as group:
            others.append(group.create_task(asyncio.sleep(LONG)))
            group.create_task(fail(KeyError("why")))
            await asyncio.sleep(LONG)

    with pytest.raises(KeyError, match="why"):
        await measure()
    assert others[0].cancelled()


async def test_an_error_of_the_body_is_its_own() -> None:
    error = BenchError("it did not come up")

    async def measure() -> None:
        async with together() as group:
            group.create_task(asyncio.sleep(LONG))
            raise error

    with pytest.raises(BenchError) as raised:
        await measure()
    assert raised.value is error


async def test_a_measurement_that_is_cancelled_is_cancelled() -> None:
    entered = asyncio.Event()

    async def measure() -> None:
        async with together() as group:
            group.create_task(asyncio.sleep(LONG))
            entered.set()
            await asyncio.sleep(LONG)

    task = asyncio.create_task(measure())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_of_several_errors_the_one_that_says_what_happened_is_raised() -> None:
    told, late, bug = BenchError("the system ended"), TimeoutError(), KeyError("x")
    assert plain(ExceptionGroup("", [bug, ExceptionGroup("", [late, told])])) is told
    assert plain(ExceptionGroup("", [bug, late])) is late
    assert plain(ExceptionGroup("", [bug, ExceptionGroup("", [bug])])) is bug
    both = ExceptionGroup("", [bug, ValueError()])
    assert plain(both) is both


def no_transport(request: httpx.Request) -> httpx.Response:
    raise RuntimeError("a bug")


def of_hand_overs() -> AbstractAsyncContextManager[Any]:
    client = httpx.AsyncClient(transport=httpx.MockTransport(no_transport), base_url="http://gateway")
    return handover.Load(client, "m", streams=2, tokens=4).running()


def of_small_requests() -> AbstractAsyncContextManager[Any]:
    return SteadyLoad("http://gateway:none/", {}, headers={}, period_seconds=0.001, most_outstanding=1).running()


def of_streams() -> AbstractAsyncContextManager[Any]:
    return Clients("http://gateway:none/", "m", headers={}, count=2).running()


def of_the_experiment() -> AbstractAsyncContextManager[Any]:
    headers = {"x-odd": "\ud800"}  # cannot be written
    load = OpenLoad("http://gateway/", "m", headers=headers, period=0.001, prompt_tokens=1, answer_tokens=1)
    return load.running(patience=LONG)


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (of_hand_overs, RuntimeError),
        (of_small_requests, httpx.InvalidURL),
        (of_streams, httpx.InvalidURL),
        (of_the_experiment, UnicodeEncodeError),
    ],
)
async def test_a_load_that_fails_ends_its_measurement(load: Any, error: type[Exception]) -> None:
    """Before, the measurement went on without it, and said that something else had not come in time."""
    with pytest.raises((error, ExceptionGroup)) as raised:
        async with load():
            await asyncio.sleep(LONG)
    found = raised.value
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, error)
