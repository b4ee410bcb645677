"""A parent that has imported vLLM once and forks an engine per line of standard input, for the tests beside it.

Each engine serves its application on a Unix socket in its own runtime folder, together with a few control routes that
call the engine as ``workers.life`` would. Started as ``python -m tests.engine.vllm.driver``; ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from workers.engine import EngineConfigError
from workers.memory import MemoryService
from workers.settings import EngineSettings

SOCKET_NAME = "http.sock"
REPORT_NAME = "report.json"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to fork."""

    name: str
    runtime_dir: str
    settings: dict[str, Any]
    service: MemoryService | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine writes into its runtime folder, whole, once it is parked or has failed."""

    error: str = ""
    message: str = ""
    seconds: float = 0.0
    longest_pause: float = 0.0
    """Between two turns of the event loop while the engine was initialised, in seconds."""


def main() -> None:
    from workers.engines.vllm.preload import preload

    preload(EngineSettings.model_validate_json(sys.argv[1]))
    print(f"ready {len(os.listdir('/proc/self/task'))}", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    children = []
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        pid = os.fork()
        if pid == 0:
            _child(order)
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _child(order: Order) -> None:
    code = 1
    try:
        os.close(0)
        import uvloop

        uvloop.run(_engine(order))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


async def _engine(order: Order) -> None:
    import uvicorn

    from workers.engines.vllm.engine import VllmEngine

    runtime_dir = Path(order.runtime_dir)
    engine = VllmEngine(EngineSettings.model_validate(order.settings), order.service, runtime_dir)
    pauses = asyncio.create_task(_longest_pause())
    started = time.monotonic()
    try:
        await engine.initialize()
    except Exception as error:
        traceback.print_exc()
        kind = EngineConfigError if isinstance(error, EngineConfigError) else type(error)
        _report(runtime_dir, Report(error=kind.__name__, message=str(error)))
        await engine.shutdown()
        return
    pauses.cancel()
    longest = await pauses
    config = uvicorn.Config(
        _Control(engine), uds=str(runtime_dir / SOCKET_NAME), lifespan="on", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    _report(runtime_dir, Report(seconds=time.monotonic() - started, longest_pause=longest))
    await serving
    await engine.shutdown()


async def _longest_pause() -> float:
    longest, before = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - before)


def _report(runtime_dir: Path, report: Report) -> None:
    unfinished = runtime_dir / f"{REPORT_NAME}.new"
    unfinished.write_bytes(msgspec.json.encode(report))
    unfinished.rename(runtime_dir / REPORT_NAME)


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


if __name__ == "__main__":
    main()
