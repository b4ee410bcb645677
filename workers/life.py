"""One engine's life, from its first look at the lock to its exit: who acts on ``workers.role``'s table.

    initialize ─► STANDBY: wait on the lock ─► PROMOTING: epoch, memory, port ─► ACTIVE: serve ─► drain ─► exit

Order is everything here and stands in one place: the lock is open before any socket (whoever builds this sees to it),
the epoch is written before memory is asked for, the port is bound last. What fails between the grant and the port is
rolled back in reverse, and the lock goes to the other engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from gms.client import GmsError
from gms.protocol import ErrorCode
from workers import metrics
from workers.admin import AdminApp, Promotion
from workers.binding import PortTaken, bind_when_free
from workers.contract import Role
from workers.engine import Engine, EngineConfigError, EngineDeadError, MemoryLostError
from workers.exit_codes import ExitCode
from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.heartbeat import BEAT_PERIOD_SECONDS, encode_beat
from workers.http_get import GetFailed, http_get
from workers.http_server import serve_http
from workers.memory import MemoryService
from workers.role import RoleEvent
from workers.serving import ServingApp
from workers.settings import EngineSettings
from workers.threads import in_daemon_thread
from workers.vitals import Kept, Vitals
from workers.worker_token import WorkerTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_CHECK_SECONDS: Final = 2.0
"""HEALTH_CHECK_INTERVAL of the reference system."""
NEIGHBOUR_SECONDS: Final = 1.0
PROMOTION_TRIES: Final = 5
"""Roll-backs in a row before the process gives itself up: what ails it may be gone with it."""
_OF_SETTINGS: Final = frozenset(
    {ErrorCode.OUT_OF_MEMORY, ErrorCode.SIZE_MISMATCH, ErrorCode.VERSION_MISMATCH, ErrorCode.WRONG_DEVICE}
)


class _Leave(Exception):
    """Told to stop."""


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
        kept: Kept | None,
        tokens: WorkerTokens | None,
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._engine = engine
        self._lock = lock
        self._service = service
        self._heartbeat_fd = heartbeat_fd
        self._kept = kept
        self._vitals = Vitals(settings, engine, kept=kept)
        self._leave = asyncio.Event()
        self._engine_died = asyncio.Event()
        self._overran = False

    async def run(self) -> int:
        """Live; returns the exit code (``workers.exit_codes``), whose reason has been logged."""
        settings = self._settings
        try:
            admin_sock = await bind_when_free(settings.host, settings.admin_port, timeout_seconds=0)
        except (PortTaken, OSError) as error:
            logger.error("the admin port cannot be opened: %s; set HOTSPARE_ADMIN_PORT", error)
            return ExitCode.BAD_CONFIGURATION
        code = ExitCode.ENGINE_DEAD
        with self._signals():
            async with serve_http(AdminApp(self._vitals.state), admin_sock) as admin, asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(work) for work in (self._beat(), self._look_at_neighbours(), _until_broken(admin))
                ]
                try:
                    code = await self._live()
                finally:
                    for helper in helpers:
                        helper.cancel()
        logger.info("engine %s exits with %d (%s)", settings.engine_id, code, code.name)
        return code

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
        return ExitCode.FORCED if self._overran and code is ExitCode.DRAINED else code

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
            await self._or_leave(self._initialize())
            while True:
                await self._serve(await self._or_leave(self._until_promoted()))
        except _Leave:
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
            logger.exception("the engine ends on an error that nothing above it expected")
            self._vitals.fail("internal error")
            return ExitCode.ENGINE_DEAD

    async def _initialize(self) -> None:
        started = time.monotonic()
        await self._engine.initialize()
        self._vitals.handle(RoleEvent.INITIALIZED)
        logger.info(
            "engine %s is ready and parked after %.2f s, weights: %s",
            self._settings.engine_id,
            time.monotonic() - started,
            self._engine.memory().weights_role,
        )

    async def _until_promoted(self) -> socket.socket:
        """Wait for the lock and be promoted; a promotion that fails is rolled back, and tried again a few times.

        Raises:
            EngineDeadError: it failed too often.
            GmsError: the memory service refuses for good.
        """
        failures = 0
        while True:
            await self._lock.acquire()
            try:
                return await self._promote()
            except (PortTaken, GmsError) as error:
                if isinstance(error, GmsError) and is_hopeless(error):
                    raise
                failures += 1
                await self._roll_back(error)
                if failures == PROMOTION_TRIES:
                    raise EngineDeadError(f"{failures} promotions in a row failed, the last one so: {error}") from error
            # Whoever else waits gets its turn first; alone, this engine does not spin on what ails it.
            await asyncio.sleep(min(self._settings.heartbeat_seconds * 2 ** (failures - 1), 10.0))

    async def _promote(self) -> socket.socket:
        """From the grant to a bound port; returns the listening socket."""
        settings = self._settings
        granted = self._lock.granted_at or time.monotonic()
        self._vitals.handle(RoleEvent.LOCK_GRANTED)
        epoch = self._vitals.epoch = self._lock.advance_epoch()
        written = time.monotonic()
        try:
            await self._engine.wake(epoch=epoch)
        except GmsError as error:
            if error.code != ErrorCode.STALE_EPOCH or self._service is None:
                raise
            # Somebody emptied or replaced the lock file: its count begins anew, the memory service's does not.
            fence = await in_daemon_thread(self._service.kv_fence, name="kv-fence")
            logger.warning(
                "epoch %d of the lock file is over: the memory service has seen %d; going on there", epoch, fence
            )
            epoch = self._vitals.epoch = self._lock.advance_epoch(at_least=fence + 1)
            await self._engine.wake(epoch=epoch)
        mapped = time.monotonic()
        sock = await bind_when_free(settings.host, settings.serving_port, timeout_seconds=settings.bind_timeout_seconds)
        if sock.fileno() < self._lock.fd:
            sock.close()
            raise RuntimeError("the listener has a lower descriptor than the lock: at death the port would outlive it")
        self._vitals.promotion = Promotion(
            epoch=epoch, granted=granted, epoch_written=written, memory_mapped=mapped, bound=time.monotonic()
        )
        return sock

    async def _roll_back(self, error: Exception) -> None:
        """Promotion failed: everything back, the lock last, so that the other engine may try."""
        logger.error("engine %s could not be promoted and parks again: %s", self._settings.engine_id, error)
        await self._engine.park()
        metrics.record_promotion("rolled_back", {})
        self._vitals.handle(RoleEvent.PROMOTION_ROLLED_BACK)
        self._lock.release()

    async def _serve(self, sock: socket.socket) -> None:
        """Serve until told to leave or dead."""
        serving = ServingApp(
            self._engine.app(),
            watch_line=self._vitals.watch_line,
            change=self._vitals.change,
            capacity=self._settings.capacity,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            is_dead=lambda: self._engine.dead,
            on_dead=self._engine_died.set,
            tokens=self._tokens,
        )
        self._vitals.serving = serving
        async with serve_http(serving, sock) as server:
            self._vitals.handle(RoleEvent.PROMOTED)
            self._record_promotion()
            try:
                await self._or_leave(self._monitor(server))
            except _Leave:
                self._vitals.handle(RoleEvent.DRAIN_STARTED)
                serving.refuse("it is shutting down")
                if not await serving.wait_idle(timeout_seconds=self._settings.drain_timeout_seconds):
                    self._overran = True
                    logger.warning(
                        "%d requests did not end within the drain timeout of %g s and are cut",
                        serving.inflight,
                        self._settings.drain_timeout_seconds,
                    )
                raise
            except EngineDeadError as error:
                self._die(error)  # here, and not when the server has taken its leave of every client
            finally:
                serving.close_watches()

    def _record_promotion(self) -> None:
        done = self._vitals.promotion
        if done is None:
            raise RuntimeError("serving without a promotion")
        metrics.record_promotion(
            "promoted",
            {
                "epoch": done.epoch_written - done.granted,
                "memory": done.memory_mapped - done.epoch_written,
                "bind": done.bound - done.memory_mapped,
            },
        )
        logger.info(
            "engine %s is active: epoch %d, %.1f ms after the lock",
            self._settings.engine_id,
            done.epoch,
            (time.monotonic() - done.granted) * 1000,
        )

    async def _monitor(self, server: asyncio.Task[None]) -> None:
        """Look after engine and server, for ever.

        Raises:
            EngineDeadError: the engine died; noticed at once if a request met it, otherwise at the next look.
            ServerEnded: nobody listens any more.
        """
        died = asyncio.ensure_future(self._engine_died.wait())
        try:
            while not server.done():
                await self._engine.check_health()
                if self._engine.dead:
                    raise EngineDeadError("the engine died")
                await asyncio.wait({died, server}, timeout=HEALTH_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            server.result()
        finally:
            died.cancel()

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

    async def _or_leave(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, unless told to leave first: then it is cancelled.

        Raises:
            _Leave: told to leave.
        """
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise _Leave
            return doing.result()
        finally:
            doing.cancel()
            leaving.cancel()
            await asyncio.wait({doing, leaving})

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

    async def _look_at_neighbours(self) -> None:
        """Learn whether the pod has a spare, for the watch. A neighbour that does not answer is none."""
        ports = self._settings.standby_admin_ports
        if not ports:
            return
        while True:
            roles = [await self._role_at(port) for port in ports]
            best = Role.STANDBY if Role.STANDBY in roles else next((role for role in roles if role), None)
            self._vitals.set_standby(best)
            await asyncio.sleep(NEIGHBOUR_SECONDS)

    async def _role_at(self, port: int) -> Role | None:
        try:
            _, body = await http_get(self._settings.host, port, "/health", timeout_seconds=NEIGHBOUR_SECONDS)
            return Role(msgspec.json.decode(body, type=dict[str, Any])["role"])
        except (GetFailed, msgspec.DecodeError, KeyError, ValueError):
            return None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM (and SIGINT, unless a keeper passes it on) asks to leave; a second one ends the process now."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM] if self._kept else [signal.SIGTERM, signal.SIGINT]

        def asked() -> None:
            if self._leave.is_set():
                logger.error("a second signal: engine %s ends now", self._settings.engine_id)
                end_process(ExitCode.FORCED)
            self._leave.set()

        for number in numbers:
            loop.add_signal_handler(number, asked)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def is_hopeless(error: GmsError) -> bool:
    """Whether the memory service would say no again until settings change: memory that does not fit even beside what
    living engines hold, say. What only is short for now, it calls retryable."""
    return error.code in _OF_SETTINGS and not error.retryable


async def _until_broken(server: asyncio.Task[None]) -> None:
    """Raises whatever ends a server before its time."""
    await asyncio.wait({server})
    server.result()


def end_process(code: ExitCode) -> NoReturn:
    """End here and now. The one place that does: for an engine that is dead, and for somebody who asked twice."""
    logging.shutdown()
    os._exit(code)
