from __future__ import annotations

import asyncio
import threading

import pytest

from workers.threads import in_daemon_thread


def fail() -> None:
    raise OSError("it broke")


async def test_the_result_comes_back() -> None:
    here = threading.get_ident()
    assert await in_daemon_thread(threading.get_ident, name="t") != here


async def test_what_it_raises_comes_back() -> None:
    with pytest.raises(OSError, match="it broke"):
        await in_daemon_thread(fail, name="t")


async def test_cancelled_it_runs_on_and_its_outcome_is_dropped() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(10)
        ended.set()
        fail()

    task = asyncio.create_task(in_daemon_thread(call, name="t"))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert ended.wait(10)
    await asyncio.sleep(0)


def test_the_loop_may_end_before_the_call() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(10)

    async def main() -> None:
        task = asyncio.create_task(in_daemon_thread(call, name="left behind"))
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()

    asyncio.run(main())
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "left behind":
            thread.join(10)
            assert not thread.is_alive()
