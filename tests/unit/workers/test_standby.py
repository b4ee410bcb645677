"""A parked engine's tests, with an engine that only tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import cast

import pytest

from workers import standby
from workers.engine import Engine, EngineDeadError, MemoryLostError
from workers.self_test import SelfTests
from workers.shutdown import Leave
from workers.standby import StandbyWatch
from workers.threads import interruptible


class Parked:
    """Tests as long as it is told to; ``over`` says that no test runs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.begun, self.finish, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stubborn = False
        self.count = 0

    async def self_test(self) -> None:
        self.count += 1
        self.begun.set()
        self.over.clear()
        try:
            await self.finish.wait()
            if self.error is not None:
                raise self.error
        finally:
            if self.stubborn:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            self.over.set()


def watch(engine: Parked, *problems: str | None, interval: float = 0.001, timeout: float = 5.0) -> StandbyWatch:
    record = SelfTests(interval_seconds=interval, timeout_seconds=timeout)
    return StandbyWatch(
        engine=cast(Engine, engine),
        record=record,
        checks=[lambda problem=problem: problem for problem in problems],  # type: ignore[misc]
        interval_seconds=interval,
        timeout_seconds=timeout,
    )


def record_of(made: StandbyWatch) -> SelfTests:
    return made._record


async def test_a_passed_test_is_recorded() -> None:
    engine = Parked()
    engine.finish.set()
    made = watch(engine, None)
    await made.test()
    assert record_of(made).report(now=0).passed == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineDeadError("its core is gone"), "failed: its core is gone"),
        (ValueError("of a library"), r"failed: ValueError\('of a library'\)"),
        (MemoryLostError("fenced"), "fenced"),
    ],
)
async def test_what_a_test_finds_ends_the_engine_and_is_said(error: Exception, said: str) -> None:
    engine = Parked(error)
    engine.finish.set()
    made = watch(engine)
    with pytest.raises(EngineDeadError, match=said) as raised:
        await made.test()
    assert isinstance(raised.value, MemoryLostError) == isinstance(error, MemoryLostError)
    report = record_of(made).report(now=0)
    assert (report.ok, report.problem) == (False, str(raised.value))


async def test_what_the_process_itself_lacks_is_found_before_the_engine_is_asked() -> None:
    engine = Parked()
    with pytest.raises(EngineDeadError, match="the lock is not the one"):
        await watch(engine, None, "the lock is not the one").test()
    assert engine.count == 0


async def test_a_test_that_hangs_is_a_failure() -> None:
    with pytest.raises(EngineDeadError, match=r"was not over in 0\.01 s"):
        await watch(Parked(), timeout=0.01).test()


async def test_the_grant_interrupts_a_test_and_waits_for_its_end() -> None:
    engine = Parked()
    made = watch(engine)
    await made.while_waiting(until(engine.begun))
    assert engine.over.is_set()
    assert record_of(made).report(now=0).passed == 0


async def test_the_grant_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "QUIT_SECONDS", 0.01)
    engine = Parked()
    engine.stubborn = True
    with pytest.raises(EngineDeadError, match="interrupted was not over"):
        await watch(engine).while_waiting(until(engine.begun))


@pytest.mark.parametrize("first", [True, False])
async def test_who_leaves_does_not_wait_for_ever_for_a_test_that_hangs(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, and one while the lock is waited for."""
    monkeypatch.setattr(standby, "QUIT_SECONDS", 0.01)
    engine, leave = Parked(), Leave(engine_id="a")
    engine.stubborn = True
    made = watch(engine)
    leaving = leave.unless_told(made.test() if first else made.while_waiting(until(asyncio.Event())))
    task = asyncio.ensure_future(leaving)
    await engine.begun.wait()
    leave.replace("a test")
    async with asyncio.timeout(5):
        with pytest.raises(EngineDeadError, match="interrupted was not over"):
            await task


async def test_tests_go_on_while_the_lock_is_waited_for_and_a_failure_ends_the_wait() -> None:
    engine = Parked()
    engine.finish.set()
    made = watch(engine)
    waiting = asyncio.ensure_future(made.while_waiting(until(asyncio.Event())))
    for _ in range(3):
        engine.begun.clear()
        await engine.begun.wait()
    engine.error = EngineDeadError("broken now")
    with pytest.raises(EngineDeadError, match="broken now"):
        await waiting


async def test_whoever_stops_waiting_leaves_no_test_behind() -> None:
    engine = Parked()
    waiting = asyncio.ensure_future(watch(engine).while_waiting(until(asyncio.Event())))
    await engine.begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.over.is_set()


async def test_without_an_interval_nobody_tests() -> None:
    engine = Parked()
    made = watch(engine, "never looked at", interval=0)
    await made.test()
    granted = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, granted.set)
    await made.while_waiting(until(granted))
    assert engine.count == 0


async def test_a_thread_that_is_interrupted_is_over_before_the_caller_goes_on() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(stop: object) -> None:
        assert callable(stop)
        begun.set()
        while not stop():
            pass
        ended.set()

    task = asyncio.ensure_future(interruptible(work, name="test"))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def until(event: asyncio.Event) -> None:
    await event.wait()
