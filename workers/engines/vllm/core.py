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
from workers.engines.vllm.arguments import Placement

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0


class Addresses:
    """The two sockets between the core and its client; they exist only while the engine does."""

    def __init__(self, runtime_dir: Path) -> None:
        self.input = f"ipc://{runtime_dir}/zmq-input"
        self.output = f"ipc://{runtime_dir}/zmq-output"

    def for_client(self) -> dict[str, str]:
        """As AsyncLLM takes them: it binds both."""
        return {"input_address": self.input, "output_address": self.output}


class _Executor(UniProcExecutor):
    """One worker in this thread; its rendezvous file lies in the runtime folder, not in the system's temp folder."""

    def _distributed_args(self) -> tuple[str, int, int]:
        placement = Placement.from_config(self.vllm_config.additional_config)
        return f"file://{placement.runtime_dir}/rendezvous", 0, 0


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

    def __init__(self, vllm_config: Any, addresses: Addresses) -> None:
        self._our_addresses = addresses
        self.steps = 0
        super().__init__(
            vllm_config=vllm_config,
            local_client=True,
            handshake_address="",
            executor_class=_Executor,
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

    def _process_engine_step(self) -> bool:
        executed: bool = super()._process_engine_step()
        self.steps += executed
        return executed


class CoreThread:
    """One engine core and the thread it lives in. Built once, never restarted: after its death the process is over."""

    def __init__(self, vllm_config: Any, addresses: Addresses) -> None:
        self._vllm_config = vllm_config
        self._addresses = addresses
        self._core: _Core | None = None
        self._built: Future[None] = Future()
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._ended: BaseException | None = None
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

    async def worker_call(self, method: str, *args: Any) -> Any:
        """Run a method of the worker between two steps."""
        return await self.call(lambda core: core.collective_rpc(method, args=args)[0])

    async def stop(self) -> None:
        """Abort what runs, and end the thread. Gives up after some seconds: the process is about to end anyway."""
        core = self._core
        if core is not None and self._thread.is_alive():
            core.shutdown_state = EngineShutdownState.REQUESTED
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning("vLLM's engine core did not end within %g s", _STOP_SECONDS)

    def check(self) -> None:
        """Raises:
        EngineDeadError: the core is not running (any more).
        """
        if not self.alive:
            raise EngineDeadError(self._epitaph())

    def _epitaph(self) -> str:
        if self._ended is None or isinstance(self._ended, SystemExit):
            return "vLLM's engine core is not running"
        return f"vLLM's engine core died: {type(self._ended).__name__}: {self._ended}"

    def _run(self) -> None:
        core: _Core | None = None
        try:
            core = _Core(self._vllm_config, self._addresses)
            self._core = core
            self._built.set_result(None)
            core.run_busy_loop()
        except BaseException as error:  # this thread's end is the engine's: it must be known, whatever it was
            self._bury(core, error)
        finally:
            if core is not None:
                core.shutdown()

    def _bury(self, core: _Core | None, error: BaseException) -> None:
        if core is None:
            self._ended = error
            self._built.set_exception(error if isinstance(error, Exception) else EngineDeadError(repr(error)))
            return
        with self._lock:
            self._ended = error
            calls = list(self._calls)
        for call in calls:
            with suppress(InvalidStateError):  # answered already, or given up by its caller
                call.future.set_exception(EngineDeadError(self._epitaph()))
        if not isinstance(error, SystemExit):
            logger.error("vLLM's engine core died", exc_info=error)
            core._send_engine_dead()
