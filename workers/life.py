"""One engine's life, from its first look at the lock to its exit: who acts on ``workers.role``'s table.

    initialize ─► STANDBY: wait on the lock ─► PROMOTING: epoch, memory, port ─► ACTIVE: serve ─► drain ─► exit

Order is everything here: the lock is open before any socket (whoever builds this sees to it), ``workers.promotion`` has
the way to the port and back, ``workers.monitor`` looks after the engine that serves, ``workers.shutdown`` is told when
it is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import NoReturn

from gms.client import GmsError
from workers.active import ActiveTime
from workers.admin import Action, AdminApp
from workers.binding import BadHost, PortTaken, bind_when_free
from workers.engine import Engine, EngineConfigError, EngineDeadError, MemoryLostError
from workers.exit_codes import ExitCode
from workers.failed_wake import is_hopeless
from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.handover import CANCEL_PATH, OFFER_PATH, OUTCOME_PATH, START_PATH, Expectation
from workers.heartbeat import BEAT_PERIOD_SECONDS, encode_beat
from workers.http_server import serve_http
from workers.leaks import LeakWatch
from workers.memory import MemoryService
from workers.monitor import EngineMonitor
from workers.neighbours import look_at_neighbours
from workers.promotion import Promoter
from workers.role import Role, RoleEvent
from workers.run_folder import RunFolder
from workers.settings import EngineSettings
from workers.shutdown import Leave, Leaving, end_process
from workers.standby import StandbyWatch
from workers.taking_over import TakingOver
from workers.usage import read_usage
from workers.vitals import Kept, Vitals
from workers.worker_token import WorkerTokens

logger = logging.getLogger(__name__)


class EngineLife:
    """Drives one engine. Build it in a process of its own, with the lock opened first, and run it once."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        engine: Engine,
        lock: FlockFailoverLock,
        service: MemoryService | None,
        heartbeat_fd: int | None,
        kept: Kept,
        tokens: WorkerTokens | None,
        key: str,
    ) -> None:
        """``key``: the pod's, for its admin ports."""
        self._settings = settings
        self._engine = engine
        self._lock = lock
        self._service = service
        self._heartbeat_fd = heartbeat_fd
        self._kept = kept
        self._vitals = Vitals(settings, engine, kept=kept)
        self._leave = Leave(engine_id=settings.engine_id)
        folder = RunFolder(lock, key, shared=settings.tensor_parallel_size > 1)
        leaks = LeakWatch(limit_bytes=settings.private_memory_limit_bytes)
        monitor = EngineMonitor(
            engine,
            interval_seconds=settings.health_check_seconds,
            leaks=leaks,
            lock_problem=folder.problem_active,
            has_spare=lambda: self._vitals.standby is Role.STANDBY,
            replace=self._leave.replace,
        )
        self._standby = StandbyWatch(
            engine=engine,
            record=self._vitals.self_tests,
            checks=(folder.problem_parked, lambda: leaks.excess(read_usage())),
            interval_seconds=settings.self_test_seconds,
            timeout_seconds=settings.self_test_timeout_seconds,
        )
        self._expectation = Expectation()
        self._promoter = Promoter(
            settings=settings,
            engine=engine,
            lock=lock,
            service=service,
            vitals=self._vitals,
            standby=self._standby,
            tokens=tokens,
            expectation=self._expectation,
        )
        self._active = ActiveTime(
            settings=settings,
            engine=engine,
            lock=lock,
            vitals=self._vitals,
            promoter=self._promoter,
            monitor=monitor,
            leave=self._leave,
            tokens=tokens,
            key=key,
        )
        self._key = key
        self._overran = False

    async def run(self) -> int:
        """Live; returns the exit code (``workers.exit_codes``), whose reason has been logged."""
        settings = self._settings
        try:
            admin_sock = await bind_when_free(settings.host, settings.admin_port, timeout_seconds=0)
        except BadHost as error:
            logger.error("%s", error)
            return ExitCode.BAD_CONFIGURATION
        except (PortTaken, OSError) as error:
            logger.error(
                "the admin port cannot be opened: %s; free it, or choose another with --admin-port or "
                "HOTSPARE_ADMIN_PORT (of a pod: --admin-ports, HOTSPARE_ADMIN_PORTS)",
                error,
            )
            return ExitCode.BAD_CONFIGURATION
        code = ExitCode.ENGINE_DEAD
        # A keeper passes SIGINT on, as SIGTERM.
        signals = [signal.SIGTERM] if self._kept.keeper_pid is not None else [signal.SIGTERM, signal.SIGINT]
        with self._leave.on_signals(signals):
            app = AdminApp(self._vitals.state, actions=self._actions(), key=self._key)
            async with serve_http(app, admin_sock) as admin, asyncio.TaskGroup() as group:
                beside = (
                    self._beat(),
                    look_at_neighbours(settings, tell=self._vitals.set_standby),
                    _until_broken(admin.ended),
                )
                helpers = [group.create_task(work) for work in beside]
                try:
                    code = await self._live()
                finally:
                    for helper in helpers:
                        helper.cancel()
        logger.info("engine %s exits with %d (%s)", settings.engine_id, code, code.name)
        return code

    def _actions(self) -> dict[str, Action]:
        """What can be asked of this engine on its admin port."""
        taking = TakingOver(
            self._settings,
            self._vitals,
            self._expectation,
            leaving=lambda: self._leave.told,
            in_line=lambda: self._lock.waiting,
            hurry=self._promoter.hurry,
        )
        return {
            START_PATH: self._active.start_handover,
            OFFER_PATH: taking.offer,
            OUTCOME_PATH: taking.outcome,
            CANCEL_PATH: taking.cancel,
        }

    # --- the way through the states

    async def _live(self) -> ExitCode:
        try:
            code = await self._until_over()
        except EngineDeadError as error:
            self._die(error)
        try:
            await self._shut_down_engine()
        finally:
            self._lock.close()
        overran = self._overran or self._active.overran
        return ExitCode.FORCED if overran and code is ExitCode.DRAINED else code

    def _die(self, error: EngineDeadError) -> NoReturn:
        """Nothing of a dead engine is worth an orderly end, and its requests wait for the other one: end now, and let
        the kernel clear up."""
        self._vitals.fail(str(error))
        lost = isinstance(error, MemoryLostError)
        end_process(ExitCode.MEMORY_SERVICE_LOST if lost else ExitCode.ENGINE_DEAD)

    async def _until_over(self) -> ExitCode:
        """Through the states, to the end of this life; its reason has been logged.

        Raises:
            EngineDeadError: the engine can serve no more.
        """
        try:
            await self._leave.unless_told(self._initialize())
            while True:
                sock = await self._leave.unless_told(self._promoter.until_promoted())
                await self._active.serve(sock, die=self._die)
        except Leaving:
            self._vitals.handle(RoleEvent.STOPPED)
            return ExitCode.DRAINED
        except EngineDeadError:
            raise
        except EngineConfigError as error:
            self._vitals.fail(str(error))
            return ExitCode.BAD_CONFIGURATION
        except GmsError as error:
            self._vitals.fail(str(error))
            return ExitCode.BAD_CONFIGURATION if is_hopeless(error) else ExitCode.MEMORY_SERVICE_LOST
        except FailoverLockError as error:
            self._vitals.fail(str(error))
            return ExitCode.ENGINE_DEAD
        except Exception:
            logger.exception("the engine ends on an unexpected error")
            self._vitals.fail("internal error")
            return ExitCode.ENGINE_DEAD

    async def _initialize(self) -> None:
        started = time.monotonic()
        await self._initialize_engine()
        await self._standby.test()  # before it is called a spare
        self._vitals.handle(RoleEvent.INITIALIZED)
        logger.info(
            "engine %s is ready and parked after %.2f s, weights: %s",
            self._settings.engine_id,
            time.monotonic() - started,
            self._engine.memory().weights_role,
        )

    async def _initialize_engine(self) -> None:
        """Raises:
        EngineDeadError: it does not come to an end. Its loop runs and so it beats, and no step is due: nobody else
            would see it. It is not waited for, since what hangs may not hear that it is cancelled, either.
        """
        seconds = self._settings.initialize_timeout_seconds
        initializing = asyncio.ensure_future(self._engine.initialize())
        try:
            done, _ = await asyncio.wait({initializing}, timeout=seconds)
        except asyncio.CancelledError:
            initializing.cancel()
            await asyncio.wait({initializing}, timeout=self._settings.engine_shutdown_seconds)
            if not initializing.done():
                raise EngineDeadError("it does not stop to initialise, though it was told to end") from None
            if not initializing.cancelled():
                initializing.result()
            raise
        if not done:
            raise EngineDeadError(f"it was not initialised within {seconds:g} s (HOTSPARE_INITIALIZE_TIMEOUT_SECONDS)")
        initializing.result()

    async def _shut_down_engine(self) -> None:
        seconds = self._settings.engine_shutdown_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._engine.shutdown()
        except TimeoutError:
            self._overran = True
            logger.error("the engine did not shut down within %g s; its process ends anyway", seconds)
        except Exception:
            logger.exception("the engine's shutdown failed; its process ends anyway")

    # --- beside it

    async def _beat(self) -> None:
        """Tell the keeper that this loop runs, and how far the engine is; a new role at once, since the keeper has
        more patience with an engine that initialises."""
        if self._heartbeat_fd is None:
            return
        while True:
            try:
                os.write(self._heartbeat_fd, encode_beat(self._vitals.beat()))
            except BlockingIOError:
                logger.warning("the keeper does not read this engine's heartbeat")
            await self._vitals.role_change.wait(timeout_seconds=BEAT_PERIOD_SECONDS)


async def _until_broken(server: asyncio.Task[None]) -> None:
    """Raises whatever ends a server before its time."""
    await asyncio.wait({server})
    server.result()
