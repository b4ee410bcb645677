"""A sim engine that does what files in the pod's folder say: its hand-over waits, comes to nothing, or ends with
somebody's death, so that no test has to be quick; and its streams end soon after a test has looked. ``HOTSPARE_ENGINE``
of a process that is to be one names its class here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from workers.asgi import Receive, Scope, Send
from workers.engine import ASGIApp
from workers.engines.sim.engine import SimEngine
from workers.handover import Expectation
from workers.recorded import RecordedApp
from workers.recorder import RECORDER

OBEDIENT = "tests.process.workers.slow_engine:Obedient"
HURRY_SECONDS = 0.001
BOUND_HEADER = "x-test-bound"


class Told(StrEnum):
    """What an engine can be told, by a file ``engine-X.does-…``."""

    WAKE_LATER = "wake-later"
    """Once this is said no more."""
    HANG_IN_WAKE = "hang-in-wake"
    NOT_WAKE = "not-wake"
    KILL_IN_WAKE = "kill-in-wake"
    """Once; the file has a pid and the signal's number."""
    KILL_IN_QUIESCE = "kill-in-quiesce"
    NOT_QUIESCE = "not-quiesce"
    HANG_IN_STEP = "hang-in-step"
    HURRY = "hurry"
    """Make a token every millisecond."""

    def file(self, pod_dir: Path, engine: str) -> Path:
        return pod_dir / f"engine-{engine}.does-{self}"


def mark(pod_dir: Path, engine: str, what: str) -> Path:
    """The engine leaves it: this has happened."""
    return pod_dir / f"engine-{engine}.is-{what}"


def hurry(pod_dir: Path, engines: Iterable[str]) -> None:
    """Their streams, this one's and those to come, end soon."""
    for engine in engines:
        Told.HURRY.file(pod_dir, engine).touch()


class Obedient(SimEngine):
    """Does what it is told; and the notes of its answer to whoever sends a certain header say that nobody could go on
    with it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        runtime_dir: Path = args[2]  # type: ignore[assignment]
        self._pod_dir, self._name = runtime_dir.parent, runtime_dir.name.removeprefix("engine-")
        pace, cancel = self._scheduler._pace, Expectation.cancel

        def hurrying() -> float:
            return HURRY_SECONDS if self._is(Told.HURRY) else pace()

        def noted(expectation: Expectation) -> None:
            cancel(expectation)
            mark(self._pod_dir, self._name, "cancelled").touch()

        self._scheduler._pace = hurrying  # type: ignore[method-assign]
        Expectation.cancel = noted  # type: ignore[method-assign]

    def _is(self, told: Told) -> bool:
        return told.file(self._pod_dir, self._name).exists()

    def _kill(self, told: Told) -> None:
        file = told.file(self._pod_dir, self._name)
        with contextlib.suppress(FileNotFoundError):
            pid, number = file.read_text().split()
            file.unlink()
            os.kill(int(pid), int(number))

    async def wake(self, *, epoch: int) -> None:
        if self._is(Told.NOT_WAKE):
            raise OSError("no such luck")
        if self._is(Told.HANG_IN_WAKE):
            await asyncio.sleep(3600)
        self._kill(Told.KILL_IN_WAKE)
        while self._is(Told.WAKE_LATER):  # noqa: ASYNC110 - it is told by another process
            await asyncio.sleep(0.01)
        await super().wake(epoch=epoch)

    async def quiesce(self, *, timeout_seconds: float) -> None:
        if self._is(Told.NOT_QUIESCE):
            raise TimeoutError
        self._kill(Told.KILL_IN_QUIESCE)
        if self._is(Told.HANG_IN_STEP):  # as one whose step is a thread's, and never over
            self._scheduler.stall()
            await asyncio.Event().wait()
        await super().quiesce(timeout_seconds=timeout_seconds)

    def app(self) -> ASGIApp:
        recorded = super().app()
        assert isinstance(recorded, RecordedApp)
        answers = recorded._app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            recorder = RECORDER.get()
            if recorder is not None and (BOUND_HEADER.encode(), b"1") in scope["headers"]:
                recorder.unresumable("adapter")
            await answers(scope, receive, send)

        return RecordedApp(app)
