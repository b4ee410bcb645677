"""vLLM's engine core as a thread of this process, and a way to run a call between two of its steps.

vLLM would start the core as a process of its own. One process per engine is what the failover lock needs (its release
then means that all of the engine's memory is back) and saves a fork, so the core runs in a daemon thread here and its
client is told that the engine is managed externally (docs/adr/0002-one-process-per-engine.md). Both still talk over
ZMQ, through sockets in the engine's runtime folder.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from workers.engine import EngineDeadError
from workers.engines.vllm import carried

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0
_MOST_ABORTED: Final = 65536
"""Between two looks at the engine; more are forgotten, and taken for answered."""
IDLE_ANSWER_SECONDS: Final = 10.0
"""How long a core without requests may take to answer. The time between two looks counts for half of it at most, so
that a suspended machine is no hang."""


class Addresses:
    """The two sockets between the core and its client; they exist only while the engine does."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.input = f"ipc://{runtime_dir}/zmq-input"
        self.output = f"ipc://{runtime_dir}/zmq-output"

    def for_client(self) -> dict[str, str]:
        """As AsyncLLM takes them: it binds both."""
        return {"input_address": self.input, "output_address": self.output}


class _Call:
    """Something to run in the core's thread between two steps, and the caller's future."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.future: Future[Any] = Future()

    def run(self, core: _Core) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function(core)
        except Exception as error:
            self.future.set_exception(error)
            return
        if isinstance(result, Future):
            result.add_done_callback(self._pass_on)
        else:
            self.future.set_result(result)

    def _pass_on(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(done.result())


class _Core(EngineCoreProc):
    """The core with its handshake answered, its steps counted, and calls accepted beside the client's requests."""

    def __init__(self, vllm_config: Any, addresses: Addresses, executor: type[UniProcExecutor]) -> None:
        self._our_addresses = addresses
        self.steps = 0
        self.aborted: deque[tuple[str, int]] = deque(maxlen=_MOST_ABORTED)
        """(request, tokens of it that had been computed), until somebody has looked."""
        super().__init__(
            vllm_config=vllm_config,
            local_client=True,
            handshake_address="",
            executor_class=executor,
            log_stats=False,
        )

    @contextmanager
    def _perform_handshakes(self, *_args: Any, **_kwargs: Any) -> Iterator[Any]:
        yield EngineZmqAddresses(inputs=[self._our_addresses.input], outputs=[self._our_addresses.output])

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if isinstance(request_type, _Call):
            request_type.run(self)
        else:
            super()._handle_client_request(request_type, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (request := self.scheduler.requests.get(request_id)) is not None:
                self.aborted.append((request_id, request.num_computed_tokens))
        super().abort_requests(request_ids)

    def _process_engine_step(self) -> bool:
        executed: bool = super()._process_engine_step()
        self.steps += executed
        return executed


class CoreThread:
    """One engine core and the thread it lives in. Built once, never restarted: after its death the process is over."""

    def __init__(self, vllm_config: Any, addresses: Addresses, executor: type[UniProcExecutor]) -> None:
        self._vllm_config = vllm_config
        self._addresses = addresses
        self._executor = executor
        self._core: _Core | None = None
        self._built: Future[None] = Future()
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._ended: BaseException | None = None
        self._question: _Call | None = None
        """The last one of ``check``."""
        self._silent = 0.0
        self._looked_at = 0.0
        self._looked_at_steps = 0
        self._stopped = False
        """Told to end, perhaps while it is still being built."""
        self._given_up = False
        """Its thread is not waited for."""
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the core takes requests."""
        return self._core is not None and self._ended is None and self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether it ran and does no more."""
        return self._ended is not None

    @property
    def steps(self) -> int:
        return self._core.steps if self._core is not None else 0

    def kv_usage(self) -> float:
        """Share of KV blocks in use. Reads counters of the core's thread; a value that is a step old does no harm."""
        return float(self._core.scheduler.get_kv_cache_usage()) if self._core is not None else 0.0

    async def start(self) -> None:
        """Load the model and build everything in the core's thread.

        Raises:
            Exception: whatever vLLM raised while it was built.
        """
        self._thread.start()
        await asyncio.wrap_future(self._built)

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """Run ``function(core)`` in the core's thread, after the step that runs now; a Future it returns is awaited.

        Raises:
            EngineDeadError: the core ended before it could answer.
            Exception: whatever the function raised.
        """
        call = _Call(function)
        with self._lock:
            if self._core is None or self._ended is not None:
                raise EngineDeadError(self._epitaph())
            self._calls.add(call)
            self._core.input_queue.put_nowait((call, None))
        try:
            return await asyncio.wrap_future(call.future)
        finally:
            with self._lock:
                self._calls.discard(call)

    def post(self, function: Callable[[Any], Any]) -> None:
        """The same for what nobody waits for: after the step that runs now, and after every call before it.

        Raises:
            EngineDeadError: the core has ended.
        """
        self._core_queue().put_nowait((_Call(function), None))

    async def worker_call(self, method: str, *args: Any) -> Any:
        """Run a method of rank 0's worker between two steps."""
        return await self.call(lambda core: worker_of(core, method, *args))

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """The same with the workers of all ranks, at the same time: what each gave, rank 0's first."""
        results: list[Any] = await self.call(lambda core: core.collective_rpc(method, args=args))
        return results

    def give_up(self, error: EngineDeadError) -> None:
        """The engine is dead, whatever its core's thread does: that may be in a kernel which never ends."""
        self._given_up = True
        self._bury(self._core, error)

    async def stop(self) -> None:
        """Abort what runs, and end the thread. Gives up after some seconds: the process is about to end anyway."""
        self._stopped = True  # before the look at the core: one that is still being built looks here once it is
        core = self._core
        if core is not None and self._thread.is_alive():
            core.shutdown_state = EngineShutdownState.REQUESTED
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        if self._thread.ident is not None and not self._given_up:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning("vLLM's engine core did not end within %g s", _STOP_SECONDS)

    def check(self, *, busy: bool) -> None:
        """Look at the core, and leave it a question for the next look; ``busy``: requests run or wait, so that an
        answer may have to wait for a step. A core that is busy and makes no step is the keeper's to find.

        Raises:
            EngineDeadError: the core is not running (any more), or answers nothing though it has nothing to do.
        """
        if not self.alive:
            raise EngineDeadError(self._epitaph())
        now, steps, question = time.monotonic(), self.steps, self._question
        if question is not None and question.future.done() and (error := question.future.exception()) is not None:
            raise EngineDeadError(f"vLLM's engine core cannot go on: {error}") from error
        if question is None or question.future.done():
            self._question = question = _Call(lambda core: core.model_executor.check_health())
            self._silent = 0.0
            self._core_queue().put_nowait((question, None))
        elif busy or steps != self._looked_at_steps:
            self._silent = 0.0
        else:
            self._silent += min(now - self._looked_at, IDLE_ANSWER_SECONDS / 2)
        self._looked_at, self._looked_at_steps = now, steps
        if self._silent > IDLE_ANSWER_SECONDS:
            raise EngineDeadError(
                f"vLLM's engine core hangs: it has nothing to do, and answers nothing for {self._silent:.0f} s"
            )

    def marks(self) -> dict[str, int]:
        """For each request in the scheduler how many of its tokens, prompt and answer, have been computed. Reads what
        the core's thread writes; a value that is a step old does no harm."""
        if self._core is None:
            return {}
        requests = self._core.scheduler.requests
        return {request.request_id: request.num_computed_tokens for request in list(requests.values())}

    def aborted(self) -> dict[str, int]:
        """The same for the requests whose clients have left since this was asked last (that a stop string was found is
        known to nobody but the client's side, and ends a request like this, too)."""
        found: dict[str, int] = {}
        while self._core is not None and self._core.aborted:
            found.update((self._core.aborted.popleft(),))
        return found

    def _core_queue(self) -> Any:
        if self._core is None:
            raise EngineDeadError(self._epitaph())
        return self._core.input_queue

    def _epitaph(self) -> str:
        if self._ended is None or isinstance(self._ended, SystemExit):
            return "vLLM's engine core is not running"
        return f"vLLM's engine core died: {type(self._ended).__name__}: {self._ended}"

    def _run(self) -> None:
        core: _Core | None = None
        self._built.set_running_or_notify_cancel()  # whoever waits for it may leave: that must not cancel it
        try:
            core = _Core(self._vllm_config, self._addresses, self._executor)
            self._core = core
            if self._stopped:
                core.shutdown_state = EngineShutdownState.REQUESTED
            if self._given_up:
                return
            self._built.set_result(None)
            core.run_busy_loop()
        except BaseException as error:  # this thread's end is the engine's: it must be known, whatever it was
            self._bury(core, error)
        finally:
            if core is not None:
                core.shutdown()

    def _bury(self, core: _Core | None, error: BaseException) -> None:
        if core is not None:
            carried.mark_fault(core, error)
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            calls = list(self._calls)
        if core is None:
            self._built.set_exception(error if isinstance(error, Exception) else EngineDeadError(repr(error)))
            return
        for call in calls:
            with suppress(InvalidStateError):  # answered already, or given up by its caller
                call.future.set_exception(EngineDeadError(self._epitaph()))
        if not isinstance(error, SystemExit):
            logger.error("vLLM's engine core died", exc_info=error)
            if threading.current_thread() is self._thread:
                core._send_engine_dead()
            else:
                core.output_queue.put_nowait(EngineCoreProc.ENGINE_CORE_DEAD)


def worker_of(core: Any, method: str, *args: Any) -> Any:
    """Call a method of rank 0's worker, in the core's thread."""
    return getattr(core.model_executor.driver_worker, method)(*args)
