"""The vLLM engine as ``workers.life`` drives it: one process, from a model folder to an application that answers.

Order of a start: arguments and config (a thread), the core with the weights (its own thread), AsyncLLM (a thread), the
application, a warm-up over scratch memory, parked. The event loop only waits meanwhile, so that it goes on beating.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gms.client import GmsError
from gms.custody_phases import CustodyState
from workers.engine import ASGIApp, EngineConfigError, EngineDeadError, EngineMemory, MemoryLostError
from workers.engines.vllm import arguments, compat
from workers.engines.vllm.preload import import_all
from workers.memory import KvMemory, MemoryService
from workers.settings import EngineSettings
from workers.weights import WeightsMemory

if TYPE_CHECKING:
    from workers.engines.vllm.core import CoreThread

logger = logging.getLogger(__name__)

_PARK_SECONDS: Final = 30.0
"""How long the core may take to come to rest: the step that runs must end first, and a long prefill is one."""


class VllmEngine:
    """Implements ``workers.engine.Engine``."""

    def __init__(self, settings: EngineSettings, service: MemoryService | None, runtime_dir: Path) -> None:
        """``service`` None: private weights and KV cache. ``runtime_dir`` exists, is this engine's alone, and goes with
        whoever made it; sockets lie in it."""
        self.models: tuple[str, ...] = ()
        self._settings = settings
        self._service = service
        self._runtime_dir = runtime_dir
        self._core: CoreThread | None = None
        self._llm: Any = None
        self._app: ASGIApp | None = None
        self._memory: EngineMemory | None = None
        self._kv: KvMemory | None = None
        self._weights: WeightsMemory | None = None
        self._awake = False

    @property
    def steps(self) -> int:
        return self._core.steps if self._core is not None else 0

    @property
    def busy(self) -> bool:
        # Counted where requests enter and not in the scheduler: a request that the core never took counts too.
        return self._llm is not None and self._llm.get_num_unfinished_requests() > 0

    @property
    def dead(self) -> bool:
        core, llm = self._core, self._llm
        ended = core is not None and llm is not None and (core.ended or bool(llm.errored))
        return ended or self._lost is not None

    async def initialize(self) -> None:
        """See ``Engine.initialize``; everything that blocks runs in threads."""
        await asyncio.to_thread(import_all)
        compat.die_of_faults()
        from vllm.v1.engine.async_llm import AsyncLLM

        from workers.engines.vllm import serving
        from workers.engines.vllm.core import Addresses, CoreThread

        namespace, config = await asyncio.to_thread(self._configure)
        addresses = Addresses(self._runtime_dir)
        self._core = CoreThread(config, addresses)
        try:
            await self._core.start()
        except GmsError:
            raise  # says itself what happened, and whether a retry can help
        except Exception as error:
            raise _start_failure(error) from error
        self._llm = await asyncio.to_thread(
            AsyncLLM.from_vllm_config,
            config,
            client_addresses=addresses.for_client(),
            disable_log_stats=True,
        )
        self._llm._run_output_handler()
        tasks = await self._core.call(lambda core: core.get_supported_tasks())
        app = await serving.build(self._llm, namespace, tasks)
        self.models = tuple(namespace.served_model_name)
        if self._service is not None:
            await self._core.worker_call("kv_scratch")
            self._kv = await self._core.worker_call("hotspare_kv")
            self._weights = await self._core.worker_call("hotspare_weights")
        await serving.warm_up(app, model=self.models[0], tasks=tasks)
        self._awake = True
        await self.park()
        self._app = app

    async def wake(self, *, epoch: int) -> None:
        """See ``Engine.wake``. The prefix index is empty afterwards: what the pages hold is not known here."""
        core = self._running_core()
        if self._awake:
            raise RuntimeError("the engine is awake already")
        with_service = self._service is not None

        def wake(core: Any) -> EngineMemory:
            if with_service:
                core.collective_rpc("kv_map", args=(epoch,))
            core.resume_scheduler()
            return _memory_of(core)

        self._memory = await core.call(wake)
        self._awake = True

    async def park(self) -> None:
        """See ``Engine.park``. Requests that still run are aborted: the caller has drained, or does not care."""
        core = self._running_core()
        self._awake = False
        try:
            async with asyncio.timeout(_PARK_SECONDS):
                # Completes when nothing runs and the prefix index is reset; the scheduler starts nothing after it.
                await core.call(lambda core: core.pause_scheduler("abort", True))
                if self._service is not None:
                    await core.worker_call("kv_unmap")
                self._memory = await core.call(_memory_of)
        except TimeoutError:
            raise EngineDeadError(f"vLLM's engine core did not come to rest within {_PARK_SECONDS:g} s") from None

    def app(self) -> ASGIApp:
        """vLLM's OpenAI application, client routes only. Serve it with the ASGI lifespan on or off, as often as needed.

        Raises:
            RuntimeError: not initialised.
        """
        if self._app is None:
            raise RuntimeError("the engine is not initialised")
        return self._app

    async def check_health(self) -> None:
        core = self._running_core()
        core.check()
        if self._llm is not None and self._llm.errored:
            raise EngineDeadError("vLLM's output handler ended")
        if (reason := self._lost) is not None:
            raise MemoryLostError(reason)

    def kv_usage(self) -> float:
        return self._core.kv_usage() if self._core is not None else 0.0

    def memory(self) -> EngineMemory:
        """As measured at the last park or wake.

        Raises:
            RuntimeError: not initialised.
        """
        if self._memory is None:
            raise RuntimeError("the engine is not initialised")
        return self._memory

    def custody(self) -> tuple[CustodyState, ...]:
        kept = (self._weights, self._kv)
        return tuple(state for memory in kept if memory is not None for state in memory.custody())

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        core, self._core = self._core, None
        if self._kv is not None:
            self._kv.interrupt()
        if core is not None:
            await core.stop()
        if llm is not None:
            llm.shutdown()

    @property
    def _lost(self) -> str | None:
        kept = (self._weights, self._kv)
        return next((memory.lost for memory in kept if memory is not None and memory.lost is not None), None)

    def _running_core(self) -> CoreThread:
        if self._core is None:
            raise EngineDeadError("the engine is not running")
        return self._core

    def _configure(self) -> tuple[Any, Any]:
        folder = arguments.model_folder(self._settings)
        architectures = arguments.read_model_config(folder).get("architectures") or ()
        arguments.register_model_class(list(architectures))
        namespace = arguments.parse(self._settings, folder)
        placement = arguments.Placement(runtime_dir=str(self._runtime_dir), service=self._service)
        return namespace, arguments.create_config(namespace, placement)


def _start_failure(error: Exception) -> Exception:
    """What stopped vLLM while it built the engine, told apart: settings and model are for a person to change, anything
    else may pass."""
    text = arguments.one_line(error)
    if isinstance(error, MemoryError) or "allocate memory" in text:  # the latter is torch's, as a RuntimeError
        return EngineConfigError(f"not enough memory for the weights: {text}")
    if (
        isinstance(error, ValueError | KeyError | OSError | AssertionError)
        or "safetensor" in type(error).__name__.lower()
    ):
        return EngineConfigError(f"vLLM cannot run this model with these settings: {type(error).__name__}: {text}")
    return error


def _memory_of(core: Any) -> EngineMemory:
    memory: EngineMemory = core.collective_rpc("hotspare_memory")[0]
    return memory
