"""From STANDBY to a serving port that answers, and back if that fails.

The lock first, then its epoch, then memory, and the port last; then the engine is asked over that port, as a gateway
would ask it, before it counts as active. What fails after the grant is rolled back in reverse (port, pages, lock), and
the lock goes to the next engine in the line (``workers.failover_lock`` says who that is).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from gms.client import GmsError
from gms.protocol import ErrorCode
from workers import metrics
from workers.binding import bind_when_free
from workers.engine import Engine, EngineConfigError, EngineDeadError, MemoryLostError
from workers.failed_wake import HINTS, TRIES, Cause, FailedWakes, WakeFailed, cause_of, is_hopeless
from workers.failover_lock import EpochLost, FlockFailoverLock
from workers.handover import Expectation
from workers.hosts import reachable
from workers.http_get import GetFailed, http_get
from workers.memory import MemoryService
from workers.role import RoleEvent
from workers.settings import EngineSettings
from workers.standby import StandbyWatch
from workers.state import Promotion
from workers.threads import in_daemon_thread
from workers.vitals import Vitals
from workers.waits import Allowance, Waits
from workers.worker_token import WorkerTokens

logger = logging.getLogger(__name__)

CHECK_PATH: Final = "/v1/models"
"""Answered by every engine's own application, behind the gate, and by no step of the engine."""


class Promoter:
    """Brings one engine from STANDBY to where it serves, as often as it is asked to."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        engine: Engine,
        lock: FlockFailoverLock,
        service: MemoryService | None,
        vitals: Vitals,
        standby: StandbyWatch,
        tokens: WorkerTokens | None,
        expectation: Expectation,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._lock = lock
        self._service = service
        self._vitals = vitals
        self._standby = standby
        self._tokens = tokens
        self._expectation = expectation
        self._limit: asyncio.Timeout | None = None
        """Of what is under way and can be cut short."""
        self._patience = 0.0
        """What that has left once nobody waits for it."""
        self._failures = FailedWakes(first_delay_seconds=settings.heartbeat_seconds)

    async def until_promoted(self) -> socket.socket:
        """Wait for the lock, wake and bind; what fails is rolled back, and tried again a few times. ``confirm`` is what
        is missing then.

        Raises:
            EngineDeadError: it failed too often.
            GmsError: the memory service refuses for good.
        """
        while True:
            await self._standby.while_waiting(self._lock.acquire())
            try:
                return await self._promote()
            except WakeFailed as error:
                await self.roll_back(error)

    async def confirm(self) -> None:
        """The last step, with the server up: whoever listens there must answer, or no gateway is to hear of it.

        Raises:
            WakeFailed: it does not; to be rolled back once the server is closed.
            EngineDeadError: the engine is dead.
        """
        settings = self._settings
        await self._engine.check_health()
        self._look_at_the_time()
        try:
            async with self._unless_late():
                status, _ = await http_get(
                    reachable(settings.host),
                    settings.serving_port,
                    CHECK_PATH,
                    timeout_seconds=settings.promotion_check_seconds,
                    headers=self._tokens.shown() if self._tokens is not None else None,
                )
        except GetFailed as error:
            raise WakeFailed(Cause.ENDPOINT, f"the engine does not answer on its own serving port: {error}") from error
        if status >= 500:
            raise WakeFailed(Cause.ENDPOINT, f"the engine answers {CHECK_PATH} on its own serving port with {status}")
        self._look_at_the_time()
        self._expectation.over()
        self._failures.succeeded()
        self._vitals.obstacle = None
        self._record()

    async def roll_back(self, error: WakeFailed) -> None:
        """Promotion failed, and nobody listens any more: everything back, the lock last, and then wait until this
        engine may stand in line again.

        Raises:
            EngineDeadError: it failed too often, or cannot be parked.
        """
        settings = self._settings
        self._expectation.over()
        following = self._failures.failed(error)
        self._vitals.obstacle = self._failures.obstacle
        logger.error(
            "engine %s could not be promoted (try %d of %d) and gives the lock back: %s; %s",
            settings.engine_id,
            self._failures.in_a_row,
            TRIES,
            error,
            HINTS[error.cause],
        )
        metrics.record_failed_promotion(error.cause, in_a_row=self._failures.in_a_row)
        # Nobody waits for a promotion that is late, but somebody does for the lock.
        limit = settings.handover_timeout_seconds if error.cause is Cause.LATE else None
        try:
            async with asyncio.timeout(limit):
                await self._engine.park()
        except Exception as second:
            raise EngineDeadError(f"it could not be parked after a promotion that failed: {second}") from second
        metrics.record_promotion("rolled_back", {})
        self._vitals.handle(RoleEvent.PROMOTION_ROLLED_BACK)
        self._lock.release()
        if following.give_up:
            dead = MemoryLostError if error.cause is Cause.SERVICE else EngineDeadError
            raise dead(f"{self._failures.in_a_row} promotions in a row failed, the last one so: {error}") from error
        # Whoever else waits gets its turn first; alone, this engine does not spin on what ails it.
        await asyncio.sleep(following.delay_seconds)

    async def _promote(self) -> socket.socket:
        """From the grant to a bound port; returns the listening socket."""
        self._vitals.handle(RoleEvent.LOCK_GRANTED)
        self._expectation.granted(now=self._lock.granted_at or time.monotonic())
        return await self.take()

    def hurry(self) -> None:
        """The engine that hands over waits no longer: what is done for it may not go on for long."""
        limit = self._limit
        if limit is None or limit.expired() or not self._expectation.late:
            return
        soon = asyncio.get_running_loop().time() + self._patience
        until = limit.when()
        limit.reschedule(soon if until is None else min(until, soon))

    @asynccontextmanager
    async def _unless_late(self) -> AsyncIterator[None]:
        """What is in here can be given up at any moment.

        Raises:
            WakeFailed: the engine that hands over goes on itself by now.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit, self._patience = limit, 0.0
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise WakeFailed(Cause.LATE, "the engine that hands over waits no longer") from None
        finally:
            self._limit = None

    def _look_at_the_time(self) -> None:
        """Between two steps, since none is left half done.

        Raises:
            WakeFailed: the engine that hands over goes on itself by now.
        """
        if self._expectation.late:
            raise WakeFailed(Cause.LATE, "the engine that hands over waits no longer")

    async def take(self) -> socket.socket:
        """The same for whoever has the lock, whatever this engine's role is.

        Raises:
            WakeFailed: it cannot be done, or not in time; what was mapped is to be parked.
            GmsError: the memory service refuses for good.
            EngineDeadError: only a new process helps.
        """
        settings = self._settings
        granted = self._lock.granted_at or time.monotonic()
        with _step(Cause.EPOCH):
            self._vitals.epoch = await self._next_epoch()
        written = time.monotonic()
        with _step(Cause.ENGINE):
            epoch = await self._wake(self._vitals.epoch)
        mapped = time.monotonic()
        self._look_at_the_time()
        with _step(Cause.PORT):
            async with self._unless_late():
                sock = await bind_when_free(
                    settings.host, settings.serving_port, timeout_seconds=settings.bind_timeout_seconds
                )
        if sock.fileno() < self._lock.fd:
            sock.close()
            raise RuntimeError("the listener has a lower descriptor than the lock: at death the port would outlive it")
        self._vitals.promotion = Promotion(
            epoch=epoch, granted=granted, epoch_written=written, memory_mapped=mapped, bound=time.monotonic()
        )
        return sock

    async def _next_epoch(self) -> int:
        """Written to the lock file.

        Raises:
            FailoverLockError: it cannot be, or what is there is no epoch and nobody else knows the last one.
            GmsError: the memory service cannot be asked.
        """
        service = self._service
        try:
            if service is None or self._lock.read_epoch():
                return self._lock.advance_epoch()
        except EpochLost as error:
            if service is None:
                raise
            logger.error("%s. The memory service knows the last epoch: going on there", error)
        # A new file, of a new pod or in the place of another, or one written over: no epoch may be there twice.
        fence = await in_daemon_thread(service.kv_fence, name="kv-fence")
        return self._lock.advance_epoch(at_least=fence + 1, anew=True)

    async def _wake(self, epoch: int) -> int:
        """Wake the engine under ``epoch``, or under the next one that the memory service takes; returns which."""
        try:
            await self._wake_in_time(epoch)
        except GmsError as error:
            if error.code != ErrorCode.STALE_EPOCH or self._service is None:
                raise
            # Somebody emptied or replaced the lock file: its count begins anew, the memory service's does not.
            fence = await in_daemon_thread(self._service.kv_fence, name="kv-fence")
            logger.warning(
                "epoch %d of the lock file is over: the memory service has seen %d; going on there", epoch, fence
            )
            with _step(Cause.EPOCH):
                epoch = self._vitals.epoch = self._lock.advance_epoch(at_least=fence + 1)
            await self._wake_in_time(epoch)
        return epoch

    async def _wake_in_time(self, epoch: int) -> None:
        allowed = Allowance(
            seconds=self._settings.wake_timeout_seconds,
            wait_seconds=self._service.longest_wait_seconds if self._service is not None else 0.0,
            waits=_waits_of(self._engine),
        )
        limit = asyncio.timeout(None)
        try:
            async with limit, _ended_by(allowed, limit):
                self._limit, self._patience = limit, self._expectation.patience_seconds
                await self._engine.wake(epoch=epoch)
        except TimeoutError:
            if not limit.expired():
                raise
            # Nothing can be rolled back under a thread that may still map pages; the kernel can.
            late = self._expectation.late
            waited = f", {allowed.waited:.1f} s for the memory service not counted" if allowed.waited > 0.05 else ""
            why = "before the engine that hands over took it all back" if late else f"in {allowed.seconds:g} s{waited}"
            raise EngineDeadError(f"it did not wake {why}, and what it has mapped is not known") from None
        finally:
            self._limit = None

    def _record(self) -> None:
        """The promotion is over: the engine serves."""
        done, now = self._vitals.promotion, time.monotonic()
        if done is None:
            raise RuntimeError("serving without a promotion")
        metrics.record_promotion(
            "promoted",
            {
                "lock": done.epoch_written - done.granted,
                "map": done.memory_mapped - done.epoch_written,
                "bind": done.bound - done.memory_mapped,
                "check": now - done.bound,
            },
        )
        metrics.record_promotions_succeed()
        logger.info(
            "engine %s is active: epoch %d, %.1f ms after the lock",
            self._settings.engine_id,
            done.epoch,
            (now - done.granted) * 1000,
        )


def _waits_of(engine: Engine) -> Waits | None:
    """Of an engine that says how long it has waited for its memory service."""
    waits = getattr(engine, "waits", None)
    return waits if isinstance(waits, Waits) else None


@asynccontextmanager
async def _ended_by(allowed: Allowance, limit: asyncio.Timeout) -> AsyncIterator[None]:
    """``limit`` comes when nothing is left of what is ``allowed``."""

    async def end() -> None:
        while (left := allowed.left) > 0:  # noqa: ASYNC110 - waits are told where they are, and not to this loop
            await asyncio.sleep(left)
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    ending = asyncio.ensure_future(end())
    try:
        yield
    finally:
        ending.cancel()
        await asyncio.wait({ending})


@contextmanager
def _step(cause: Cause) -> Iterator[None]:
    """What fails in here is a promotion that failed of ``cause``, unless it says that a new process is needed, or other
    settings."""
    try:
        yield
    except (WakeFailed, EngineDeadError, EngineConfigError):
        raise
    except GmsError as error:
        if is_hopeless(error):
            raise
        raise WakeFailed(cause_of(error), str(error)) from error
    except Exception as error:
        if cause is Cause.ENGINE:
            logger.exception("the engine did not wake")
        raise WakeFailed(cause, f"{error}" or type(error).__name__) from error
