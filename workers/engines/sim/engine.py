"""SimEngine: the Engine protocol over a scheduler, a mapping of pseudo weights and KV slots."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum
from functools import partial
from pathlib import Path

from gms.custody_phases import CustodyState
from workers.engine import ASGIApp, EngineDeadError, EngineMemory, MemoryLostError
from workers.engines.sim.app import SimApp
from workers.engines.sim.batch import SimRequest
from workers.engines.sim.memory import SimKv, SimWeights
from workers.engines.sim.scheduler import Scheduler
from workers.engines.sim.tokens import token_at
from workers.memory import MemoryService
from workers.settings import EngineSettings
from workers.threads import in_daemon_thread

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "sim"


class SimFault(Enum):
    """What can be made to go wrong, for tests. There is no way back: a faulty engine is there to be replaced."""

    HANG_LOOP = "hang_loop"
    """The event loop blocks for ever: no beat, no answer, and only SIGKILL ends the process."""
    STALL_STEPS = "stall_steps"
    """The loop runs, but no step is made while requests wait for one."""
    DEAD = "dead"
    """``check_health`` raises EngineDeadError, and running requests end with it."""


class SimEngine:
    """An engine that needs no model; see ``workers.engine.Engine`` for what each method promises.

    ``runtime_dir`` is for an engine's own sockets; the sim has none.
    """

    def __init__(self, settings: EngineSettings, service: MemoryService | None, runtime_dir: Path) -> None:
        self._settings = settings
        self._service = service
        self._weights = SimWeights(settings.sim, service)
        self._kv: SimKv | None = None
        self._scheduler = Scheduler(
            slots=settings.capacity,
            ttft_seconds=settings.sim.ttft_seconds,
            token_seconds=settings.sim.token_seconds,
            make_token=self._make_token,
        )
        self._loop_task: asyncio.Task[None] | None = None
        self.models: tuple[str, ...] = (settings.served_model_name or DEFAULT_MODEL,)

    @property
    def steps(self) -> int:
        return self._scheduler.steps

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def dead(self) -> bool:
        return self._scheduler.failure is not None or self._lost is not None

    async def initialize(self) -> None:
        """Attach the weights and reserve the KV range; takes at least ``startup_seconds``."""
        ready_at = time.monotonic() + self._settings.sim.startup_seconds
        self._kv = SimKv(self._settings.sim, self._service, slots=self._settings.capacity)
        await in_daemon_thread(self._weights.attach, name="sim-weights")
        await asyncio.sleep(max(0.0, ready_at - time.monotonic()))
        self._loop_task = asyncio.create_task(self._scheduler.run(), name="sim-steps")
        logger.debug("weights: %d bytes, %s", self._weights.size_bytes, self._weights.role)

    async def wake(self, *, epoch: int) -> None:
        await in_daemon_thread(partial(self._initialized.map, epoch=epoch), name="sim-kv")
        self._scheduler.resume()

    async def park(self) -> None:
        """Requests that are still here wait for the next ``wake``; whoever serves them decides whether they end."""
        self._scheduler.pause()
        await in_daemon_thread(self._initialized.unmap, name="sim-kv")

    def app(self) -> ASGIApp:
        return SimApp(self._scheduler, model=self.models[0], max_model_len=self._settings.sim.max_model_len)

    async def check_health(self) -> None:
        if self._scheduler.failure is not None:
            raise EngineDeadError(str(self._scheduler.failure)) from self._scheduler.failure
        if self._loop_task is None:
            raise EngineDeadError("the engine was not initialized, or was shut down")
        if (reason := self._lost) is not None:
            raise MemoryLostError(reason)

    def kv_usage(self) -> float:
        """A request holds one slot of the KV pages from its prefill to its end."""
        return self._scheduler.usage

    def memory(self) -> EngineMemory:
        size = self._weights.size_bytes
        return EngineMemory(
            weights_bytes=size,
            weights_outside_gms_bytes=size if self._service is None else 0,
            weights_role=self._weights.role,
            kv_bytes=self._kv.size_bytes if self._kv is not None else 0,
            kv_mapped=self._kv is not None and self._kv.mapped,
        )

    def custody(self) -> tuple[CustodyState, ...]:
        return (*self._weights.custody(), *(self._kv.custody() if self._kv is not None else ()))

    def inject(self, fault: SimFault) -> None:
        """Make ``fault`` happen; HANG_LOOP from the loop's next turn on, so that the caller can still answer."""
        logger.warning("fault injected: %s", fault.value)
        match fault:
            case SimFault.HANG_LOOP:
                asyncio.get_running_loop().call_soon(_hang)
            case SimFault.STALL_STEPS:
                self._scheduler.stall()
            case SimFault.DEAD:
                self._scheduler.fail(EngineDeadError("a fault was injected: dead"))

    async def shutdown(self) -> None:
        self._scheduler.fail(EngineDeadError("the engine was shut down"))
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        kv, self._kv = self._kv, None
        if kv is not None:
            await in_daemon_thread(kv.close, name="sim-kv")
        await in_daemon_thread(self._weights.close, name="sim-weights")

    @property
    def _initialized(self) -> SimKv:
        if self._kv is None:
            raise RuntimeError("the engine was not initialized, or was shut down")
        return self._kv

    @property
    def _lost(self) -> str | None:
        return self._weights.lost or (self._kv.lost if self._kv is not None else None)

    def _make_token(self, request: SimRequest) -> int:
        token = token_at(self._weights.words, request.digest, len(request.tokens))
        return self._initialized.through(request, token)


def _hang() -> None:
    while True:
        time.sleep(3600)
