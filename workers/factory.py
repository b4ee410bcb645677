"""The composition root of the worker's processes: which engine is which, and what each is built from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import uvloop

from workers import cuda, engine_folder, http_server, metrics
from workers.contract import WorkerTokenError
from workers.engine import Engine, EngineConfigError, EngineDeadError
from workers.engine_lock import EngineLock, EngineLockError
from workers.engines import catalogue, fit
from workers.exit_codes import ExitCode
from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.hosts import is_loopback
from workers.keeper import Keeper, KeeperTimeouts
from workers.ledger import Ledger
from workers.life import EngineLife
from workers.memory import MemoryService
from workers.pod_files import EngineFile, announced, own_pid_namespace
from workers.pod_key import PodKeyError, pod_key
from workers.ranks import Ranks
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
    with ExitStack() as stack:
        try:
            stack.callback(EngineLock(settings.pod_dir, settings.engine_id).close)
            preload(settings)
        except (EngineLockError, EngineConfigError) as error:
            logger.error("%s", error)
            return ExitCode.BAD_CONFIGURATION
        if settings.parent_pid is None:  # no supervisor writes of it in pod.json
            try:
                stack.enter_context(announced(settings.pod_dir, engine_file(settings)))
            except OSError as error:
                logger.error(
                    "this engine cannot say where it is: `hotspare status` and `hotspare handover` will not find it; "
                    "%s cannot be written to: %s",
                    settings.pod_dir,
                    error.strerror,
                )
        return _run(settings)


def engine_file(settings: EngineSettings) -> EngineFile:
    """What an engine says of itself where nobody else speaks for it."""
    return EngineFile(
        pod=settings.pod,
        instance=settings.instance,
        engine=settings.engine_id,
        pid=os.getpid(),
        pid_namespace=own_pid_namespace(),
        host=settings.host,
        serving_port=settings.serving_port,
        admin_port=settings.admin_port,
        gms=tuple(str(settings.gms_socket_of(device)) for device in settings.devices) if settings.gms else (),
    )


def _run(settings: EngineSettings) -> int:
    ledger = Ledger.open(settings.pod_dir / f"engine-{settings.engine_id}.metrics", instance=settings.instance)
    metrics.keep_in(ledger)  # before the first fork: every engine of this keeper goes on counting there
    runtime_dir = settings.pod_dir / f"engine-{settings.engine_id}"
    if not settings.keeper:
        with _empty(runtime_dir):
            return run_engine(settings, runtime_dir=runtime_dir, heartbeat_fd=None, keeper_pid=None)
    keeper_pid = os.getpid()
    keeper = Keeper(
        name=f"engine {settings.engine_id}",
        engine_main=lambda heartbeat_fd, _: run_engine(
            settings, runtime_dir=runtime_dir, heartbeat_fd=heartbeat_fd, keeper_pid=keeper_pid
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
    """Import the engine's class, and have it import what else it will need, if it has a ``preload``; under a keeper
    without starting a thread.

    Raises:
        EngineConfigError: there is no such engine, or it does not fit.
    """
    if (problem := http_server.misfit()) is not None:
        raise EngineConfigError(problem)
    found = catalogue.find(settings.engine)
    loaded = catalogue.load(found)
    fit.check_class(loaded, name=found.target)
    if caveat := getattr(loaded, "caveat", ""):
        logger.warning("engine %s: %s", found.name, caveat)
    if hook := getattr(loaded, "preload", None):
        hook(settings)
    threads = len(os.listdir("/proc/self/task"))
    if settings.keeper and cuda.initialised():
        raise EngineConfigError(
            f"importing the engine {found.name} initialised CUDA, which no child of this process could use then; it "
            "must leave the GPU alone before initialize(), or go without a keeper (--no-keeper)"
        )
    if settings.keeper and threads != 1:
        raise EngineConfigError(
            f"importing the engine {found.name} started {threads - 1} threads, and its keeper cannot fork with them; "
            "start them in initialize(), or go without a keeper (--no-keeper)"
        )


def memory_services(settings: EngineSettings) -> list[MemoryService]:
    """The pod's memory services as this engine's ranks use them, one each; empty: it has none."""
    if not settings.gms:
        return []
    return [
        MemoryService(
            socket=str(settings.gms_socket_of(device)),
            device=device,
            engine=settings.engine_id,
            instance=settings.instance,
            timeout_seconds=settings.memory_timeout_seconds,
            connect_seconds=settings.memory_connect_seconds,
            memory_wait_seconds=settings.memory_wait_seconds,
        )
        for device in settings.devices
    ]


def build_engine(
    settings: EngineSettings, service: MemoryService | None, *, runtime_dir: Path, ranks: Ranks | None = None
) -> Engine:
    """The engine that the settings name, not yet initialised.

    Raises:
        EngineConfigError: there is no such engine, it does not fit, or it says so itself.
    """
    found = catalogue.find(settings.engine)
    loaded = catalogue.load(found)
    fit.check_class(loaded, name=found.target)
    more = {"ranks": ranks} if ranks is not None else {}
    engine: Engine = loaded(settings, service, runtime_dir, **more)
    fit.check_instance(engine, name=found.target)
    return engine


def fork_ranks(
    settings: EngineSettings, services: Sequence[MemoryService], *, lock: FlockFailoverLock, close: Sequence[int]
) -> Ranks | None:
    """The engine's further ranks; None: it has none.

    Raises:
        EngineConfigError: this engine cannot have any.
    """
    size = settings.tensor_parallel_size
    if size == 1:
        return None
    found = catalogue.find(settings.engine)
    make_rank = getattr(catalogue.load(found), "make_rank", None)
    if make_rank is None:
        raise EngineConfigError(
            f"the engine {found.name} runs in one process on one device here, and cannot be spread over {size}; "
            "set HOTSPARE_TENSOR_PARALLEL_SIZE to 1 (docs/lifecycle.md, Several ranks)"
        )
    return Ranks.fork(make_rank(settings, services), size=size, lock_fd=lock.fd, close=close)


def run_engine(settings: EngineSettings, *, runtime_dir: Path, heartbeat_fd: int | None, keeper_pid: int | None) -> int:
    """One engine's life in this process."""
    try:
        tokens = worker_tokens(settings)
    except WorkerTokenError as error:
        logger.error("%s; check HOTSPARE_WORKER_TOKEN_FILE", error)
        return ExitCode.BAD_CONFIGURATION
    if tokens is None and not is_loopback(settings.host):
        logger.warning(
            "%s can be reached from other machines, and there is no worker token: everybody who reaches the serving "
            "port may use the engine; see HOTSPARE_WORKER_TOKEN_FILE",
            settings.host,
        )
    try:
        key = pod_key(settings.pod_dir)
        lock = FlockFailoverLock(settings.lock_path)  # before any socket: see workers.failover_lock
    except (FailoverLockError, PodKeyError) as error:
        logger.error("%s", error)
        return ExitCode.BAD_CONFIGURATION

    services = memory_services(settings)
    try:
        # Before there is a loop or a thread.
        ranks = fork_ranks(settings, services, lock=lock, close=() if heartbeat_fd is None else (heartbeat_fd,))
    except (EngineConfigError, EngineDeadError) as error:
        logger.error("%s", error)
        return ExitCode.BAD_CONFIGURATION if isinstance(error, EngineConfigError) else ExitCode.ENGINE_DEAD
    service = services[0] if services else None
    if service is not None and ranks is not None:
        service = msgspec.structs.replace(service, fenced_pids=ranks.pids, peers=tuple(services[1:]))

    async def live() -> int:
        try:
            more = {"ranks": ranks} if ranks is not None else {}
            engine = build_engine(settings, service, runtime_dir=runtime_dir, **more)
        except EngineConfigError as error:
            logger.error("%s", error)
            lock.close()
            return ExitCode.BAD_CONFIGURATION
        life = EngineLife(
            settings=settings,
            engine=engine,
            lock=lock,
            service=service,
            heartbeat_fd=heartbeat_fd,
            kept=Kept(keeper_pid, restarts=metrics.count_life()),
            tokens=tokens,
            key=key,
        )
        return await life.run()

    return uvloop.run(live())


@contextmanager
def _empty(runtime_dir: Path) -> Iterator[None]:
    """The engine's folder, as a keeper makes and removes it. What an engine that died has left is in nobody's way: the
    next one begins with an empty folder."""
    engine_folder.make_empty(runtime_dir)
    try:
        yield
    finally:
        engine_folder.remove(runtime_dir)


def _prepare_pod_dir(pod_dir: Path) -> str | None:
    try:
        pod_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"the pod's folder {pod_dir} cannot be made: {error.strerror}; set HOTSPARE_RUN_DIR to a writable folder"
    if not os.access(pod_dir, os.W_OK | os.X_OK):
        return f"the pod's folder {pod_dir} is not writable by this user; set HOTSPARE_RUN_DIR to a folder that is"
    return None
