"""What the processes of a run folder say about themselves right now: asked side by side, each with a deadline.

Nothing here raises because somebody is dead or silent: that is an answer too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from app.cli.run_dir import GatewayFile, PodFile
from workers.contract import Role
from workers.http_get import GetFailed, http_get

DEADLINE_SECONDS: Final = 1.0

T = TypeVar("T")


class Absence(StrEnum):
    """Why an engine says nothing."""

    GONE = "gone"
    """Nobody listens on its admin port: there is no such process now."""
    SILENT = "silent"
    """Somebody listens, and does not answer: stopped, or stuck."""


class EngineMemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``workers.engine.EngineMemory`` that is shown."""

    weights_bytes: int
    weights_outside_gms_bytes: int
    weights_role: str
    kv_bytes: int
    kv_mapped: bool


class PromotionReport(msgspec.Struct, frozen=True, kw_only=True):
    """When the last promotion was granted and done; seconds of the machine's monotonic clock."""

    epoch: int
    granted: float
    bound: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``workers.admin.EngineState`` that the command line uses; what else comes is ignored."""

    instance: str
    engine: str
    role: Role
    role_seconds: float
    pid: int
    epoch: int
    inflight: int
    capacity: int
    rss_bytes: int
    monotonic: float
    restarts: int = 0
    models: tuple[str, ...] = ()
    memory: EngineMemoryReport | None = None
    promotion: PromotionReport | None = None
    failure: str | None = None

    @property
    def since(self) -> float:
        """When it took its role; seconds of the machine's monotonic clock."""
        return self.monotonic - self.role_seconds


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway thinks of one worker."""

    address: str
    state: str
    routable: bool
    worker: str | None = None
    epoch: int | None = None
    models: tuple[str, ...] = ()


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the gateway's ``/status`` that the command line uses."""

    lifecycle: str
    inflight: int
    waiting: int
    workers: tuple[WorkerReport, ...]


EngineAnswer = EngineReport | Absence


async def ask_engine(pod: PodFile, engine: str, *, timeout_seconds: float = DEADLINE_SECONDS) -> EngineAnswer:
    """``/state`` of one engine. Another pod's engine on that port is not it: a stale file names ports of anybody."""
    port = pod.engines[engine].admin_port
    answer = await _ask(reachable(pod.host), port, "/state", EngineReport, timeout_seconds)
    if isinstance(answer, EngineReport) and (answer.instance, answer.engine) != (pod.instance, engine):
        return Absence.GONE
    return answer


async def ask_gateway(file: GatewayFile, *, timeout_seconds: float = DEADLINE_SECONDS) -> GatewayReport | Absence:
    """``/status`` of the gateway."""
    return await _ask(reachable(file.host), file.port, "/status", GatewayReport, timeout_seconds)


async def ask_pod(pod: PodFile, *, timeout_seconds: float = DEADLINE_SECONDS) -> dict[str, EngineAnswer]:
    """Every engine of one pod, at the same time."""
    asked = (ask_engine(pod, engine, timeout_seconds=timeout_seconds) for engine in pod.engines)
    return dict(zip(pod.engines, await asyncio.gather(*asked), strict=True))


async def in_daemon_thread(work: Callable[[], T], *, timeout_seconds: float) -> T:
    """Run a blocking call, and leave it behind when it does not end in time: nobody waits for it at exit.

    Raises:
        TimeoutError: it did not end in time.
        Exception: what ``work`` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # T may itself be optional

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(timeout_seconds):
        return await done


def reachable(host: str) -> str:
    """An address of this machine at which a server bound to ``host`` is found."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def private_bytes(pid: int) -> int | None:
    """Memory that would be free without this process: its private pages, those of the memory service not counted.

    The service's pages are memfd mappings; while one engine alone has them mapped the kernel counts them as private to
    it, though they outlive it. So the mappings are added up one by one. None: the process is gone or not ours to see.
    """
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    return sum_private(smaps)


def sum_private(smaps: bytes) -> int:
    """Sum of the ``Private_`` lines of ``/proc/PID/smaps``, memfd mappings left out; bytes. Pure."""
    total, counted = 0, True
    for line in smaps.splitlines():
        if line.startswith(b"Private_"):
            if counted:
                total += int(line.split()[1]) * 1024
        elif b"-" in line.partition(b" ")[0]:  # "7f12-7f34 rw-s ... /memfd:gms:kv (deleted)" begins a mapping
            counted = b" /memfd:gms" not in line
    return total


async def _ask(host: str, port: int, path: str, kind: type[T], timeout_seconds: float) -> T | Absence:
    try:
        _, body = await http_get(host, port, path, timeout_seconds=timeout_seconds)
        return msgspec.json.decode(body, type=kind)
    except GetFailed as error:
        refused = isinstance(error.__cause__, ConnectionRefusedError | ConnectionResetError)
        return Absence.GONE if refused else Absence.SILENT
    except msgspec.DecodeError:
        return Absence.SILENT
