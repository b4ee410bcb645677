from __future__ import annotations

import asyncio
import logging

import pytest

from workers.tasks import logged


async def fails() -> None:
    raise ValueError("it cannot be")


async def test_an_error_of_a_task_that_nobody_waits_for_is_in_the_log_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = asyncio.create_task(fails())
    logged(task, "nothing is done")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "nothing is done: it cannot be")
    assert record.exc_info is not None


async def test_a_task_that_ends_well_or_is_cancelled_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (0, 60)]
    for task in tasks:
        logged(task, "nothing is done")
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert not caplog.records
