from __future__ import annotations

import asyncio
import itertools

import pytest

from app import drain as module
from app.admission import AdmissionController, InflightToken
from app.drain import Drain, DrainProgress, DrainStage
from app.intake.uploads import LEAST_BYTES, Uploads
from app.lifecycle import LifecycleMachine
from app.openai.errors import GatewayError


class FakeConnection:
    def __init__(self, *, stuck: bool = False) -> None:
        self.stuck = asyncio.Event()
        if not stuck:
            self.stuck.set()
        self.told = 0

    def last_answer(self) -> None:
        self.told += 1

    async def written(self, patience: float) -> None:
        assert patience == 9
        await self.stuck.wait()

    def cut(self) -> bool:
        was_stuck = not self.stuck.is_set()
        self.stuck.set()
        return was_stuck


class FakeSessions:
    def __init__(self) -> None:
        self.count = 0
        self.told = 0
        self.closed = asyncio.Event()
        self.closed.set()

    def drain(self) -> None:
        self.told += 1

    async def wait_closed(self) -> None:
        await self.closed.wait()


class Bench:
    def __init__(self, *, timeout: float, stuck: bool = False) -> None:
        self.admission = AdmissionController(LifecycleMachine(), limit=9)
        self.progress = DrainProgress()
        self.connection = FakeConnection(stuck=stuck)
        self.connections = [self.connection]
        self.sessions = FakeSessions()
        self.interrupted: list[GatewayError] = []
        self.tokens: list[InflightToken] = []
        self.obedient = True
        self.drain = Drain(
            self.progress,
            self.admission,
            self.sessions,
            timeout=timeout,
            write_timeout=9,
            interrupt_all=self.interrupt_all,
            connections=lambda: self.connections,
        )

    def interrupt_all(self, error: GatewayError) -> int:
        self.interrupted.append(error)
        assert self.progress.stage is DrainStage.CUTTING
        if self.obedient:
            for token in self.tokens:
                token.release()
        return len(self.tokens)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.05)
    monkeypatch.setattr(module, "UNWINDING_SECONDS", 0.05)


async def test_nothing_in_flight() -> None:
    bench = Bench(timeout=5)
    assert bench.progress.stage is DrainStage.NONE
    assert bench.progress.remaining(0) == 0
    assert await bench.drain.run("x")
    assert (bench.progress.stage, bench.progress.cut, bench.interrupted) == (DrainStage.DONE, 0, [])
    assert bench.connection.told == 1


async def test_first_the_requests_and_then_their_readers() -> None:
    bench = Bench(timeout=5, stuck=True)
    token = bench.admission.admit()
    running = asyncio.create_task(bench.drain.run("x"))
    await asyncio.sleep(0)
    assert bench.progress.stage is DrainStage.WAITING
    assert 4 < bench.progress.remaining(bench.progress.deadline - 4.5) < 5
    token.release()
    while bench.progress.stage is DrainStage.WAITING:  # noqa: ASYNC110  # a few turns of the loop
        await asyncio.sleep(0)
    assert bench.progress.stage is DrainStage.FLUSHING
    bench.connection.stuck.set()
    assert await running
    assert not bench.interrupted


async def test_sessions_are_told_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(timeout=5)
    bench.sessions.count = 2
    bench.sessions.closed.clear()
    with caplog.at_level("INFO"):
        running = asyncio.create_task(bench.drain.run("x"))
        await asyncio.sleep(0.01)
    assert "draining 0 requests and 2 realtime sessions" in caplog.text
    assert (bench.sessions.told, bench.progress.stage) == (1, DrainStage.WAITING)
    bench.sessions.closed.set()
    assert await running
    assert not bench.interrupted


async def test_a_session_that_does_not_end_is_reported() -> None:
    bench = Bench(timeout=0.01)
    bench.sessions.closed.clear()
    assert not await bench.drain.run("x")
    assert len(bench.interrupted) == 1


async def test_what_is_left_at_the_end_is_told() -> None:
    bench = Bench(timeout=0.01)
    bench.tokens = [bench.admission.admit(), bench.admission.admit()]
    assert await bench.drain.run("x")
    assert (bench.progress.cut, [error.code for error in bench.interrupted]) == (2, ["draining"])


async def test_readers_that_take_nothing_are_closed_on() -> None:
    bench = Bench(timeout=0.01, stuck=True)
    assert await bench.drain.run("x")
    assert bench.connection.stuck.is_set()


async def test_a_request_that_does_not_end_is_reported() -> None:
    bench = Bench(timeout=0.01)
    bench.tokens = [bench.admission.admit()]
    bench.obedient = False
    assert not await bench.drain.run("x")
    assert bench.progress.stage is DrainStage.DONE


async def test_one_that_fails_leaves_none_untold(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeConnection):
        def last_answer(self) -> None:
            raise RuntimeError("a bug")

        def cut(self) -> bool:
            raise RuntimeError("another bug")

    bench = Bench(timeout=0.01, stuck=True)
    bench.connections.insert(0, Broken())
    bench.sessions.drain = bench.connections[0].last_answer  # type: ignore[method-assign]
    assert await bench.drain.run("x")
    assert bench.connection.told == 1
    assert bench.connection.stuck.is_set()
    assert caplog.text.count("RuntimeError: a bug") == 2
    assert "another bug" in caplog.text


async def test_an_upload_that_fails_leaves_none_uninterrupted() -> None:
    def fail(error: GatewayError) -> None:
        raise RuntimeError("a bug")

    uploads = Uploads(stall_seconds=60)
    told: list[GatewayError] = []
    error = GatewayError(503, "draining", "x", type="server_error", fault="internal", retryable=True)
    expected = [uploads.expect(60, lambda: 0, refuse) for refuse in (fail, told.append, fail, told.append)]
    assert uploads.interrupt_all(error) == 4
    assert told == [error, error]
    for upload in expected:
        upload.end()


async def test_an_upload_whose_time_is_over_in_the_moment_of_the_cut_is_refused_once() -> None:
    uploads = Uploads(stall_seconds=60)
    draining = GatewayError(503, "draining", "x", type="server_error", fault="internal", retryable=True)

    async def read() -> None:
        async with uploads.within(60, lambda: 0):
            (upload,) = uploads._expected
            upload._ends = 0
            upload._look()
            assert uploads.interrupt_all(draining) == 1
            await asyncio.Event().wait()

    with pytest.raises(GatewayError) as caught:
        await read()
    assert caught.value.code == "request_timeout"


async def test_uploads_end_with_the_drain_and_later_ones_never_begin() -> None:
    uploads = Uploads(stall_seconds=60)
    forever = asyncio.Event()
    began = asyncio.Event()
    error = GatewayError(503, "draining", "x", type="server_error", fault="internal", retryable=True)

    async def upload(seconds: float) -> None:
        async with uploads.within(seconds, lambda: 0):
            began.set()
            await forever.wait()

    running = asyncio.create_task(upload(60))
    await began.wait()
    assert uploads.interrupt_all(error) == 1
    for attempt in (running, upload(60)):
        with pytest.raises(GatewayError) as caught:
            await attempt
        assert caught.value is error
    assert uploads.interrupt_all(error) == 0


async def test_an_upload_that_is_too_slow() -> None:
    uploads = Uploads(stall_seconds=60)
    with pytest.raises(GatewayError) as caught:
        async with uploads.within(0.01, lambda: 0):
            await asyncio.Event().wait()
    assert caught.value.code == "request_timeout"
    async with uploads.within(5, lambda: 0):
        pass


async def test_an_upload_that_trickles() -> None:
    uploads = Uploads(stall_seconds=0.02)
    come = 0
    stalled: asyncio.Future[GatewayError] = asyncio.get_running_loop().create_future()
    upload = uploads.expect(60, lambda: come, stalled.set_result)
    come = LEAST_BYTES - 1
    assert (await stalled).code == "request_timeout"
    upload.end()
    assert uploads.interrupt_all(await stalled) == 0


async def test_an_upload_that_makes_progress_has_its_whole_time() -> None:
    looks = itertools.count(0, LEAST_BYTES)
    with pytest.raises(GatewayError) as caught:
        async with Uploads(stall_seconds=0.01).within(0.1, lambda: next(looks)):
            await asyncio.Event().wait()
    assert "0.1 s" in caught.value.message
    assert next(looks) > 3 * LEAST_BYTES
