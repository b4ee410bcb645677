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
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from workers.asgi import respond_json
from workers.memory import MemoryService
from workers.settings import EngineSettings

SOCKET_NAME = "http.sock"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to fork."""

    name: str
    runtime_dir: str
    settings: dict[str, Any]
    service: MemoryService | None = None


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
        _say(Forked(name=order.name, pid=pid))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _child(order: Order, forked_at: float) -> None:
    code = 1
    try:
        os.close(0)
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


class _Control:
    """The engine's application, and ``/control/...`` beside it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._routes: dict[str, Callable[[str], Awaitable[object]]] = {
            "wake": self._wake,
            "park": self._park,
            "status": self._status,
            "health": self._health,
            "break": self._break,
            "fault": self._fault,
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

    async def _status(self, _: str) -> object:
        return {
            "memory": msgspec.to_builtins(self._engine.memory()),
            "custody": msgspec.to_builtins(self._engine.custody()),
            "steps": self._engine.steps,
            "busy": self._engine.busy,
            "kv_usage": self._engine.kv_usage(),
            "models": list(self._engine.models),
        }

    async def _health(self, _: str) -> None:
        await self._engine.check_health()

    async def _break(self, _: str) -> None:
        """The next step raises: the core's thread dies as it would on any fault of vLLM's."""

        def sabotage(core: Any) -> None:
            def fail() -> None:
                raise RuntimeError("a step failed, as the test wants it")

            core.step_fn = fail

        await self._engine._core.call(sabotage)

    async def _fault(self, _: str) -> None:
        """A memory fault in the core's thread."""
        await self._engine._core.call(lambda _core: ctypes.string_at(0))


if __name__ == "__main__":
    main()
