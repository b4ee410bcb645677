"""A sim engine whose hand-over takes its time, or comes to nothing, while a file in the pod's folder says so: then a
test can step in. ``HOTSPARE_ENGINE`` of a process that is to be one names its class here."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path

from workers.asgi import Receive, Scope, Send
from workers.engine import ASGIApp
from workers.engines.sim.engine import SimEngine
from workers.recorded import RecordedApp
from workers.recorder import RECORDER

SLOW_SECONDS = 3.0
BOUND_HEADER = "x-test-bound"


class Told(StrEnum):
    """What an engine can be told, by a file ``engine-X.does-…``."""

    SLOW_TO_WAKE = "slow-to-wake"
    HANG_IN_WAKE = "hang-in-wake"
    NOT_WAKE = "not-wake"
    SLOW_TO_QUIESCE = "slow-to-quiesce"
    NOT_QUIESCE = "not-quiesce"
    HANG_IN_STEP = "hang-in-step"

    def file(self, pod_dir: Path, engine: str) -> Path:
        return pod_dir / f"engine-{engine}.does-{self}"


def mark(pod_dir: Path, engine: str, what: str) -> Path:
    """The engine leaves it: this is happening now."""
    return pod_dir / f"engine-{engine}.is-{what}"


class Obedient(SimEngine):
    """Does what it is told; and the notes of its answer to whoever sends a certain header say that nobody could go on
    with it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        runtime_dir: Path = args[2]  # type: ignore[assignment]
        self._pod_dir, self._name = runtime_dir.parent, runtime_dir.name.removeprefix("engine-")

    def _is(self, told: Told) -> bool:
        return told.file(self._pod_dir, self._name).exists()

    async def wake(self, *, epoch: int) -> None:
        if self._is(Told.NOT_WAKE):
            raise OSError("no such luck")
        if self._is(Told.HANG_IN_WAKE):
            await asyncio.sleep(3600)
        if self._is(Told.SLOW_TO_WAKE):
            mark(self._pod_dir, self._name, "waking").touch()
            await asyncio.sleep(SLOW_SECONDS)
        await super().wake(epoch=epoch)

    async def quiesce(self, *, timeout_seconds: float) -> None:
        if self._is(Told.NOT_QUIESCE):
            raise TimeoutError
        if self._is(Told.SLOW_TO_QUIESCE):
            mark(self._pod_dir, self._name, "quiescing").touch()
            await asyncio.sleep(SLOW_SECONDS)
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
