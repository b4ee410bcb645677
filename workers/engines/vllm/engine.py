"""The vLLM engine as ``workers.life`` drives it: one process, from a model folder to an application that answers.

Order of a start: arguments and config (a thread), the core with the weights (its own thread), AsyncLLM (a thread), the
application, a warm-up over scratch memory, parked. The event loop only waits meanwhile, so that it goes on beating.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gms.client import GmsError
from gms.custody_phases import CustodyState
from gms.rotation import CHECK_SECONDS
from workers.engine import (
    RELEASE_SECONDS,
    ASGIApp,
    EngineConfigError,
    EngineDeadError,
    EngineMemory,
    MemoryLostError,
)
from workers.engines.vllm import arguments, build, compat
from workers.engines.vllm.preload import import_all, preload
from workers.engines.vllm.ranks import make_rank
from workers.engines.vllm.start_failure import failure_of, is_for_a_person, may_pass
from workers.engines.vllm.warm_up import warm_up
from workers.kv_memory import KvMemory
from workers.memory import MemoryService
from workers.progress import TokenProgress
from workers.ranks import Ranks
from workers.settings import EngineSettings
from workers.threads import interruptible
from workers.waits import Waits
from workers.weights import WeightsMemory

if TYPE_CHECKING:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from workers.engines.vllm.core import CoreThread

logger = logging.getLogger(__name__)

RANK_SECONDS: Final = 2.0
"""What a further rank may take beyond what it waits for."""
_PARK_SECONDS: Final = 30.0
"""How long the core may take to come to rest: the step that runs must end first, and a long prefill is one."""


class VllmEngine:
    """Implements ``workers.engine.Engine``."""

    preload = staticmethod(preload)
    leaves = (
        r"thread Thread-\d+ \(process_(in|out)put_sockets\)",
        r"descriptor anon_inode:\[event(fd|poll)\]",
        r"thread tqdm_monitor",
    )
    """What vLLM has no way to end, daemons and the sockets that they poll, in the words of ``hotspare conformance``; it
    goes with the process."""
    make_rank = staticmethod(make_rank)
    """See ``workers.ranks``: this engine can have further ranks."""

    def __init__(
        self, settings: EngineSettings, service: MemoryService | None, runtime_dir: Path, ranks: Ranks | None = None
    ) -> None:
        """``service`` None: private weights and KV cache. ``runtime_dir`` exists, is this engine's alone, and goes with
        whoever made it; sockets lie in it."""
        self.models: tuple[str, ...] = ()
        self.max_model_len = 0
        self._settings = settings
        self._service = service
        self._ranks = ranks
        self._runtime_dir = runtime_dir
        self._core: CoreThread | None = None
        self._llm: Any = None
        self._app: ASGIApp | None = None
        self._memory: EngineMemory | None = None
        self._kv: KvMemory | None = None
        self._weights: WeightsMemory | None = None
        self._awake = False
        self._progress = TokenProgress(
            timeout_seconds=settings.token_timeout_seconds, interval_seconds=settings.health_check_seconds
        )

    @property
    def steps(self) -> int:
        return self._core.steps if self._core is not None else 0

    @property
    def busy(self) -> bool:
        # Counted where requests enter and not in the scheduler: a request that the core never took counts too.
        return self._llm is not None and self._llm.get_num_unfinished_requests() > 0

    @property
    def waits(self) -> Waits | None:
        """For the memory service, of all ranks; None before there are KV pages to wait for."""
        return self._kv.waits if self._kv is not None else None

    @property
    def dead(self) -> bool:
        core, llm = self._core, self._llm
        ended = core is not None and llm is not None and (core.ended or bool(llm.errored))
        return ended or self._lost is not None

    async def initialize(self) -> None:
        """See ``Engine.initialize``; everything that blocks runs in threads."""
        await asyncio.to_thread(import_all, self._settings.device)
        compat.die_of_faults()
        from workers.engines.vllm import carried, serving
        from workers.engines.vllm.core import Addresses, CoreThread
        from workers.engines.vllm.replay import ReplayingLLM

        namespace, config = await asyncio.to_thread(self._configure)
        addresses = Addresses(self._runtime_dir)
        self._core = CoreThread(config, addresses, self._executor())
        for pidfd in self._ranks.pidfds if self._ranks is not None else ():
            asyncio.get_running_loop().add_reader(pidfd, self._rank_died, pidfd)
        try:
            await self._core.start()
        except (GmsError, EngineDeadError, EngineConfigError):
            raise  # says itself what happened, and whether a retry can help
        except Exception as error:
            if may_pass(error) or is_for_a_person(error):
                kind = type(error).__name__
                raise failure_of(error, f"vLLM cannot run this model with these settings: {kind}") from error
            raise
        self._llm = await asyncio.to_thread(
            ReplayingLLM.from_vllm_config,
            config,
            client_addresses=addresses.for_client(),
            disable_log_stats=True,
        )
        self._llm._run_output_handler()
        self._llm.resume_with(
            seeds_resume=await self._core.worker_call("hotspare_seeds_resume"),
            configuration=await asyncio.to_thread(arguments.answers_key, self._settings, config),
        )
        tasks = await self._core.call(lambda core: core.get_supported_tasks())
        app = await serving.build(self._llm, namespace, tasks)
        self.models = tuple(namespace.served_model_name)
        self.max_model_len = int(self._llm.model_config.max_model_len)
        if self._service is not None:
            key = await asyncio.to_thread(arguments.answers_key, self._settings, config)
            await self._core.call(partial(carried.keep_index, key=key, wanted=self._settings.kv_carry_over))
            await self._core.call_workers("kv_scratch")
            self._kv = await self._core.worker_call("hotspare_kv")
            self._weights = await self._core.worker_call("hotspare_weights")
        await warm_up(app, model=self.models[0], tasks=tasks)
        self._awake = True
        await self.park()
        self._app = app

    async def wake(self, *, epoch: int) -> None:
        """See ``Engine.wake``. The prefix cache is then what the engine before left of it, if that can be believed."""
        from workers.engines.vllm import carried

        core = self._running_core()
        if self._awake:
            raise RuntimeError("the engine is awake already")
        with_service = self._service is not None

        def wake(core: Any) -> EngineMemory:
            if with_service:
                core.model_executor.map_pages(epoch)
                carried.take_over(core)
            core.resume_scheduler()
            return _memory_of(core)

        self._memory = await core.call(wake)
        self._awake = True

    async def park(self) -> None:
        """See ``Engine.park``. Requests that still run are aborted: the caller has drained, or does not care."""
        from workers.engines.vllm import carried

        core = self._running_core()
        self._awake = False
        try:
            async with asyncio.timeout(_PARK_SECONDS):
                # Completes when nothing runs; the scheduler starts nothing after it.
                await core.call(lambda core: core.pause_scheduler("abort", False))
                await core.call(carried.leave)
                if self._service is not None:
                    await core.call_workers("kv_unmap")
                self._memory = await core.call(_memory_of)
        except TimeoutError:
            raise EngineDeadError(f"vLLM's engine core did not come to rest within {_PARK_SECONDS:g} s") from None

    async def self_test(self) -> None:
        """See ``Engine.self_test``: mappings, a part of the weights, and a step over scratch memory in the core's own
        thread, so that one which hangs shows too."""
        await self.check_health()
        core, weights = self._running_core(), self._weights
        if weights is not None:

            def check(stop: Callable[[], bool]) -> str | None:
                until = time.monotonic() + CHECK_SECONDS
                return weights.check(enough=lambda: stop() or time.monotonic() > until)

            if (problem := await interruptible(check, name="vllm-self-test")) is not None:
                raise EngineDeadError(problem)
        stop = threading.Event()
        one = partial(core.worker_call, "hotspare_try_out", stop.is_set)
        trial = asyncio.ensure_future(one() if self._ranks is None else core.call(partial(_try_out_all, stop.is_set)))
        try:
            problem = await asyncio.shield(trial)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({trial})
            raise
        if problem is not None:
            raise EngineDeadError(problem)

    async def quiesce(self, *, timeout_seconds: float) -> None:
        """See ``Engine.quiesce``. ``park`` would have vLLM end its requests as aborted."""
        from workers.engines.vllm import carried

        core = self._running_core()
        try:
            async with asyncio.timeout(timeout_seconds):
                await core.call(lambda core: core.pause_scheduler("keep", False))
        except TimeoutError:
            # After the step in hand, whenever that ends. It is not waited for: this engine serves on at once, and for
            # a core that hangs in its step the keeper looks, as ever.
            core.post(lambda core: core.resume_scheduler())
            raise
        self._awake = False
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await core.call(carried.preempt)
                if self._service is not None:
                    await core.call_workers("kv_unmap")
                self._memory = await core.call(_memory_of)
        except TimeoutError:
            raise EngineDeadError(f"the KV pages were not released within {RELEASE_SECONDS:g} s") from None
        except Exception as error:
            raise EngineDeadError(f"the KV pages could not be released: {error}") from error

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
        core.check(busy=self.busy)
        if self._llm is not None and self._llm.errored:
            raise EngineDeadError("vLLM's output handler ended")
        if (reason := self._lost) is not None:
            raise MemoryLostError(reason)
        marks, aborted = core.marks(), core.aborted()
        if (reason := self._progress.observe(marks, aborted=aborted, now=time.monotonic())) is not None:
            raise EngineDeadError(reason)

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
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            for pidfd in ranks.pidfds:
                asyncio.get_running_loop().remove_reader(pidfd)
            await asyncio.to_thread(ranks.close)
        if llm is not None:
            llm.shutdown()

    def _executor(self) -> type[UniProcExecutor]:
        from workers.engines.vllm.executor import executor_in, executor_over

        if self._ranks is None:
            return executor_in(self._runtime_dir, build.ordinal(self._settings.device))
        waits = self._service.longest_wait_seconds if self._service is not None else 0.0
        call = max(self._settings.step_timeout_seconds, waits + RANK_SECONDS)
        load = call + (self._service.timeout_seconds if self._service is not None else 0.0)
        return executor_over(
            self._ranks,
            self._runtime_dir,
            load_seconds=load,
            call_seconds=call,
            map_seconds=self._settings.wake_timeout_seconds,
            wait_seconds=waits,
        )

    def _rank_died(self, pidfd: int) -> None:
        """Rank 0 may be in the middle of a step, waiting for it, and would do so for ever."""
        asyncio.get_running_loop().remove_reader(pidfd)
        if self._ranks is not None and self._core is not None and (death := self._ranks.death()) is not None:
            self._core.give_up(death)

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
        config = arguments.create_config(namespace, self._service, device=self._settings.device)
        if self._service is not None:
            compat.pin_hash_seed(config.cache_config.prefix_caching_hash_algo, self._service.instance)
        return namespace, config


def _memory_of(core: Any) -> EngineMemory:
    memory: EngineMemory = core.model_executor.driver_worker.hotspare_memory()
    return memory


def _try_out_all(stopped: Callable[[], bool], core: Any) -> str | None:
    """A self-test of all ranks: what is wrong, or None."""
    for method in ("hotspare_check_memory", "hotspare_try_out"):
        if stopped():
            return None
        for rank, problem in enumerate(core.collective_rpc(method)):
            if problem is not None:
                return f"rank {rank}: {problem}"
    return None
