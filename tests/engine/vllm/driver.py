"""A parent that has imported vLLM once and forks an engine per line of standard input, for the tests beside it.

Each engine serves its application on a Unix socket in its own runtime folder, together with a few control routes that
call the engine as ``workers.life`` would. Started as ``python -m tests.engine.vllm.driver``; ends with its input.
Says on standard output, a JSON object a line: a ``Ready``, then per engine a ``Forked`` and later a ``Report``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gms import libc
from workers.asgi import respond_json
from workers.engine import EngineConfigError
from workers.engines.vllm import arguments, compat, shims
from workers.memory import MemoryService
from workers.recorder import RECORDER, Recorder
from workers.settings import EngineSettings

SOCKET_NAME = "http.sock"
PRELOADED: set[str] = set()
"""Modules that the parent had imported when it was ready to fork."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to fork."""

    name: str
    runtime_dir: str
    settings: dict[str, Any]
    service: MemoryService | None = None
    scheduler: str = ""
    """Another class than vLLM's config leads to, which on a CPU is always the same."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The parent is ready to fork."""

    seconds: float
    threads: int
    levels: dict[str, int]
    """Of loggers, by name, as they are after everything was imported; the root's is empty."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine's process exists."""

    name: str
    pid: int


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine is parked and serves, or has failed."""

    name: str
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    """From fork to parked."""
    longest_pause: float = 0.0
    """Between two turns of the event loop while the engine was initialised, in seconds."""


Line = Ready | Forked | Report


def main() -> None:
    from workers.engines.vllm.preload import preload

    logging.getLogger().setLevel(logging.INFO)
    started = time.monotonic()
    preload(EngineSettings.model_validate_json(sys.argv[1]))
    import uvloop  # noqa: F401 - the engine's process has imported it itself

    importlib.import_module("workers.engines.vllm.engine")
    PRELOADED.update(sys.modules)
    gc.collect()
    gc.freeze()
    levels = {name: logging.getLogger(name).getEffectiveLevel() for name in ("", "workers", "gms.custody")}
    _say(Ready(seconds=time.monotonic() - started, threads=len(os.listdir("/proc/self/task")), levels=levels))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    children = []
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        forked_at = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(order, forked_at)
        children.append(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _child(order: Order, forked_at: float) -> None:
    code = 1
    try:
        _say(Forked(name=order.name, pid=os.getpid()))  # said here, so that it comes before the report
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)  # not closed: the next descriptor would be 0, and libuv aborts when it has to close that
        os.close(nowhere)
        import uvloop

        uvloop.run(_engine(order, forked_at))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


async def _engine(order: Order, forked_at: float) -> None:
    import uvicorn

    from workers.engines.vllm.engine import VllmEngine

    runtime_dir = Path(order.runtime_dir)
    if order.scheduler:
        setattr(arguments, "SCHEDULER", order.scheduler)  # noqa: B010 - it is a constant everywhere but here
    engine = VllmEngine(EngineSettings.model_validate(order.settings), order.service, runtime_dir)
    pauses = asyncio.create_task(_longest_pause())
    try:
        await engine.initialize()
    except Exception as error:
        traceback.print_exc()
        _say(Report(name=order.name, error=type(error).__name__, message=str(error)))
        await engine.shutdown()
        return
    pauses.cancel()
    longest = await pauses
    config = uvicorn.Config(
        _Control(engine), uds=str(runtime_dir / SOCKET_NAME), lifespan="on", log_level="warning", access_log=False
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            _say(Report(name=order.name, seconds=time.monotonic() - forked_at, longest_pause=longest))

    await Server(config).serve()
    await engine.shutdown()


async def _longest_pause() -> float:
    longest, before = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - before)


def _say(line: Line) -> None:
    os.write(1, msgspec.json.encode(line) + b"\n")  # one write, so that lines of several processes do not mix


async def _nowhere(_: Any) -> None:
    return


class _Control:
    """The engine's application, and ``/control/...`` beside it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._go = threading.Event()
        self._routes: dict[str, Callable[[str], Awaitable[object]]] = {
            "wake": self._wake,
            "park": self._park,
            "quiesce": self._quiesce,
            "status": self._status,
            "health": self._health,
            "aborted": self._aborted,
            "break": self._break,
            "fault": self._fault,
            "without": self._without,
            "cost": self._cost,
            "names": self._names,
            "plant": self._plant,
            "self-test": self._self_test,
            "interrupt": self._interrupt,
            "spoil": self._spoil,
            "hang": self._hang,
            "hang-in-step": self._hang_in_step,
            "hang-in-release": self._hang_in_release,
            "go-on": self._go_on,
            "imported": self._imported,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if not path.startswith("/control/"):
            await self._engine.app()(scope, receive, send)
            return
        started = time.perf_counter()
        try:
            answer = await self._routes[path.removeprefix("/control/")](scope["query_string"].decode())
        except Exception as error:
            await respond_json(send, 500, {"error": type(error).__name__, "message": str(error)})
            return
        seconds = time.perf_counter() - started
        await respond_json(send, 200, {"answer": answer, "seconds": seconds})

    async def _wake(self, epoch: str) -> None:
        await self._engine.wake(epoch=int(epoch))

    async def _park(self, _: str) -> None:
        await self._engine.park()

    async def _quiesce(self, seconds: str) -> None:
        await self._engine.quiesce(timeout_seconds=float(seconds or 30))

    async def _status(self, _: str) -> object:
        return {
            "memory": msgspec.to_builtins(self._engine.memory()),
            "custody": msgspec.to_builtins(self._engine.custody()),
            "refusal": kv.carried.refusal and kv.carried.refusal.value if (kv := self._engine._kv) else None,
            "steps": self._engine.steps,
            "busy": self._engine.busy,
            "kv_usage": self._engine.kv_usage(),
            "models": list(self._engine.models),
            "max_model_len": self._engine.max_model_len,
        }

    async def _health(self, _: str) -> None:
        await self._engine.check_health()

    async def _aborted(self, _: str) -> list[int]:
        return list(self._engine._core.aborted().values())

    async def _break(self, _: str) -> None:
        """The next step raises: the core's thread dies as it would on any fault of vLLM's."""

        def sabotage(core: Any) -> None:
            def fail() -> None:
                raise RuntimeError("a step failed, as the test wants it")

            core.step_fn = fail

        await self._engine._core.call(sabotage)

    async def _plant(self, _: str) -> None:
        """Each block's entry in the index becomes another one's, well made."""

        def swap(core: Any) -> None:
            index = core.scheduler.kv_cache_manager.block_pool.index
            entries = index.entries()
            for entry, other in zip(entries, [*entries[1:], entries[0]], strict=True):
                index.publish(other._replace(block=entry.block, stamp=entry.stamp))

        await self._engine._core.call(swap)

    async def _without(self, seam: str) -> str:
        """What the check of seams says if vLLM lacks one, as ``module:Class.attribute``."""
        module, _, path = seam.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner = importlib.import_module(module)
        for part in owner_path.split(".") if owner_path else ():
            owner = getattr(owner, part)
        kept = getattr(owner, name)
        delattr(owner, name)
        try:
            compat.check_seams("cpu:0")
        except EngineConfigError as error:
            return str(error)
        finally:
            setattr(owner, name, kept)
        return ""

    async def _cost(self, logprobs: str) -> float:
        """What a unit costs more with its note than without, microseconds of this process; ``logprobs``: how many of
        each token."""
        from tests.engine.vllm.note_cost import microseconds

        return await microseconds(int(logprobs))

    async def _names(self, root: str) -> list[str]:
        """Times and ids as the serving layer gets them while an answer with this root is recorded; empty: none is."""
        from vllm.entrypoints.anthropic import serving as anthropic
        from vllm.entrypoints.openai.chat_completion import protocol
        from vllm.entrypoints.openai.responses import utils
        from vllm.parser.mistral import MistralToolCall
        from vllm.renderers.chat_utils import make_tool_call_id

        shims.replace_choices()
        token = RECORDER.set(Recorder(_nowhere, root=root) if root else None)
        try:
            return [
                str(anthropic.time.time()),
                str(protocol.time.time()),
                anthropic.uuid.uuid4().hex,
                utils.random_uuid(),
                protocol.ChatCompletionRequest(messages=[]).request_id,
                make_tool_call_id(),
                MistralToolCall.generate_random_id(),
            ]
        finally:
            RECORDER.reset(token)

    async def _self_test(self, _: str) -> None:
        await self._engine.self_test()

    async def _interrupt(self, after: str) -> float:
        """Seconds that a self-test goes on after it is told to stop, at a moment of it."""
        testing = asyncio.ensure_future(self._engine.self_test())
        await asyncio.wait({testing}, timeout=float(after))
        told = time.perf_counter()
        testing.cancel()
        await asyncio.wait({testing})
        return time.perf_counter() - told

    async def _spoil(self, what: str) -> None:
        """Break what a parked engine would need."""
        weights = self._engine._weights
        page, anonymous = libc.PAGE_BYTES, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED
        if what == "mapping":
            libc.mmap(weights._range.address + page, page, libc.PROT_READ, anonymous)
        elif what == "digest":
            weights._rotation._digests = tuple(b"x" * 16 for _ in weights._rotation._digests)
        elif what == "numbers":
            await self._engine._core.call(_other_numbers)

    async def _hang(self, _: str) -> None:
        """The core's thread waits for a lock that it holds."""
        from workers.engines.vllm import core

        core.IDLE_ANSWER_SECONDS = 1.0  # type: ignore[misc]
        lock = threading.Lock()
        lock.acquire()
        self._engine._core._core.input_queue.put_nowait((core._Call(lambda _core: lock.acquire()), None))

    async def _hang_in_step(self, _: str) -> None:
        """The next step is not over before ``go-on``."""

        def sabotage(core: Any) -> None:
            step = core.step_fn

            def hang() -> Any:
                self._go.wait()
                core.step_fn = step
                return step()

            core.step_fn = hang

        self._go.clear()
        await self._engine._core.call(sabotage)

    async def _hang_in_release(self, _: str) -> None:
        """The next time that pages are taken away it is not over before ``go-on``."""
        from workers.engines.vllm import engine

        def sabotage(core: Any) -> None:
            worker = core.model_executor.driver_worker.worker
            unmap = worker.kv_unmap

            def hang() -> None:
                self._go.wait()
                worker.kv_unmap = unmap
                unmap()

            worker.kv_unmap = hang

        engine.RELEASE_SECONDS = 0.5  # type: ignore[misc]
        self._go.clear()
        await self._engine._core.call(sabotage)

    async def _go_on(self, _: str) -> None:
        self._go.set()

    async def _imported(self, _: str) -> list[str]:
        """Files of modules that were imported only after the fork."""
        new = sorted(sys.modules.keys() - PRELOADED)
        return [name for name in new if getattr(sys.modules[name], "__file__", None)]

    async def _fault(self, _: str) -> None:
        """A memory fault in the core's thread."""
        await self._engine._core.call(lambda _core: ctypes.string_at(0))


def _other_numbers(core: Any) -> None:
    """A weight that is not the shared one: what no look at mappings shows."""
    runner = core.model_executor.driver_worker.worker.model_runner
    parameter = next(iter(runner.get_model().parameters()))
    parameter.data = parameter.data * 1.5


if __name__ == "__main__":
    main()
