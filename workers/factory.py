"""The composition root of the worker's processes: which engine is which, and what each is built from."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import uvloop

from workers.contract import WorkerTokenError
from workers.engine import Engine, EngineConfigError
from workers.exit_codes import ExitCode
from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.hosts import is_loopback
from workers.keeper import Keeper, KeeperTimeouts
from workers.life import EngineLife
from workers.memory import MemoryService
from workers.settings import EngineSettings
from workers.vitals import Kept
from workers.worker_token import worker_tokens

logger = logging.getLogger(__name__)


def run_engine_process(settings: EngineSettings) -> int:
    """``hotspare engine``: a keeper and the engines it forks, or (``keeper`` off) the engine itself."""
    problem = _prepare_pod_dir(settings.pod_dir)
    if problem:
        logger.error("%s", problem)
        return ExitCode.BAD_CONFIGURATION
    try:
        preload(settings)
    except EngineConfigError as error:
        logger.error("%s", error)
        return ExitCode.BAD_CONFIGURATION
    runtime_dir = settings.pod_dir / f"engine-{settings.engine_id}"
    if not settings.keeper:
        runtime_dir.mkdir(mode=0o700, exist_ok=True)
        return run_engine(settings, runtime_dir=runtime_dir, heartbeat_fd=None, kept=None)
    keeper_pid = os.getpid()
    keeper = Keeper(
        name=f"engine {settings.engine_id}",
        engine_main=lambda heartbeat_fd, restarts: run_engine(
            settings, runtime_dir=runtime_dir, heartbeat_fd=heartbeat_fd, kept=Kept(keeper_pid, restarts)
        ),
        runtime_dir=runtime_dir,
        timeouts=KeeperTimeouts(
            beat=settings.beat_timeout_seconds,
            init_beat=settings.init_beat_timeout_seconds,
            step=settings.step_timeout_seconds,
            end=settings.engine_shutdown_seconds,
        ),
    )
    return keeper.run()


def preload(settings: EngineSettings) -> None:
    """Import everything the engine will need, without starting a thread."""
    if settings.engine == "sim":
        import workers.engines.sim.engine  # noqa: F401 - for the forks
    else:
        from workers.engines.vllm.preload import preload as preload_vllm

        preload_vllm(settings)


def memory_service(settings: EngineSettings) -> MemoryService | None:
    """The pod's memory service as this engine uses it; None: it has none."""
    if not settings.gms:
        return None
    return MemoryService(
        socket=str(settings.gms_socket),
        device=settings.device,
        engine=settings.engine_id,
        instance=settings.instance,
        timeout_seconds=settings.memory_timeout_seconds,
        connect_seconds=settings.memory_connect_seconds,
        memory_wait_seconds=settings.memory_wait_seconds,
    )


def build_engine(settings: EngineSettings, service: MemoryService | None, *, runtime_dir: Path) -> Engine:
    """The engine that the settings name, not yet initialised."""
    if settings.engine == "sim":
        from workers.engines.sim.engine import SimEngine

        return SimEngine(settings, service, runtime_dir)
    from workers.engines.vllm.engine import VllmEngine

    return VllmEngine(settings, service, runtime_dir)


def run_engine(settings: EngineSettings, *, runtime_dir: Path, heartbeat_fd: int | None, kept: Kept | None) -> int:
    """One engine's life in this process."""
    try:
        tokens = worker_tokens(settings)
    except WorkerTokenError as error:
        logger.error("%s; check HOTSPARE_WORKER_TOKEN_FILE", error)
        return ExitCode.BAD_CONFIGURATION
    if tokens is None and not is_loopback(settings.host):
        logger.warning(
            "%s can be reached from other machines, and there is no worker token: whoever reaches the serving port may "
            "use the engine; see HOTSPARE_WORKER_TOKEN_FILE",
            settings.host,
        )
    try:
        lock = FlockFailoverLock(settings.lock_path)  # before any socket: see workers.failover_lock
    except FailoverLockError as error:
        logger.error("%s", error)
        return ExitCode.BAD_CONFIGURATION

    async def live() -> int:
        service = memory_service(settings)
        engine = build_engine(settings, service, runtime_dir=runtime_dir)
        life = EngineLife(
            settings=settings,
            engine=engine,
            lock=lock,
            service=service,
            heartbeat_fd=heartbeat_fd,
            kept=kept,
            tokens=tokens,
        )
        return await life.run()

    return uvloop.run(live())


def _prepare_pod_dir(pod_dir: Path) -> str | None:
    try:
        pod_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"the pod's folder {pod_dir} cannot be made: {error.strerror}; set HOTSPARE_RUN_DIR to a writable folder"
    if not os.access(pod_dir, os.W_OK | os.X_OK):
        return f"the pod's folder {pod_dir} is not writable by this user; set HOTSPARE_RUN_DIR to a folder that is"
    return None
