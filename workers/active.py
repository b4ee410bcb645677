"""An engine's time on the serving port: from its promotion until its requests have ended or are another engine's.

What ends it: it is told to leave, somebody asks for a hand-over, or it dies. A hand-over that is taken back begins a
new epoch on a new listener; the requests of before end on the connections that they have.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec

from workers import metrics
from workers.admin import Answer
from workers.change import Change
from workers.contract import Role
from workers.draining import drain
from workers.engine import Engine, EngineDeadError
from workers.failed_wake import Cause, WakeFailed
from workers.failover_lock import FlockFailoverLock
from workers.first_token import FirstToken
from workers.handing_over import HandingOver, Result
from workers.handover import Asked, Stage, budget
from workers.http_server import ServerEnded
from workers.monitor import EngineMonitor
from workers.older_ports import OlderPorts
from workers.promotion import Promoter
from workers.role import RoleEvent
from workers.serving import ServingApp
from workers.serving_port import ServingPort, open_port
from workers.settings import EngineSettings
from workers.shutdown import Leave, Leaving
from workers.vitals import Vitals
from workers.worker_token import WorkerTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Errand(NamedTuple):
    """A hand-over that somebody asked for, and waits for."""

    asked: Asked
    result: asyncio.Future[Result]


TOGETHER_SECONDS: Final = 0.1
"""Between the signals to the engines of one pod, at most: a moment that saves a hand-over that would be taken back."""


class Dying(Protocol):
    """Ends the process."""

    def __call__(self, error: EngineDeadError) -> NoReturn: ...


class ActiveTime:
    """``overran``: requests were cut in the end."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        engine: Engine,
        lock: FlockFailoverLock,
        vitals: Vitals,
        promoter: Promoter,
        monitor: EngineMonitor,
        leave: Leave,
        tokens: WorkerTokens | None,
        key: str,
    ) -> None:
        """``key``: the pod's, for its admin ports."""
        self._settings = settings
        self._engine = engine
        self._lock = lock
        self._vitals = vitals
        self._promoter = promoter
        self._monitor = monitor
        self._leave = leave
        self._tokens = tokens
        self._key = key
        self._ended = Change()
        """Tells of the end of each request and watch."""
        self._errands: asyncio.Queue[Errand] = asyncio.Queue()
        self._errand: Errand | None = None
        """The hand-over that was asked for and is not over."""
        self.overran = False

    async def start_handover(self, body: bytes) -> Answer:
        """POSTed by a person who wants this pod's engines to change places (``workers.handover.Asked``); answered when
        they have, or have not. Cancelled, it is called off if it still waits for requests, and goes on otherwise."""
        asked = msgspec.json.decode(body, type=Asked)
        role = self._vitals.role
        if role is not Role.ACTIVE:
            return 409, {"reason": f"it is {role} and not {Role.ACTIVE}"}
        if self._leave.told or self._errand is not None:
            return 409, {"reason": "it is about to hand over, or to stop"}
        errand = self._errand = Errand(asked, asyncio.get_running_loop().create_future())
        self._errands.put_nowait(errand)
        result = await errand.result  # which is cancelled with this, when whoever asked has gone
        return 200 if result.stage is Stage.HANDED_OVER else 409, result

    async def serve(self, sock: socket.socket, *, die: Dying) -> None:
        """Serve on the listening ``sock`` until told to leave, handed over, or dead: then ``die``, at once. Returns
        only if what listens there does not answer.

        Raises:
            Leaving: its requests have ended, or are another engine's.
        """
        try:
            async with OlderPorts(self._vitals.older, ended=self._ended) as older, AsyncExitStack() as current:
                port = await self._open(current, sock)
                await self._leave.unless_told(self._promoter.confirm())
                self._vitals.handle(RoleEvent.PROMOTED)
                try:
                    await self._serve_on(port, current, older)
                except EngineDeadError as error:
                    die(error)  # here, and not when the server has taken its leave of every client
        except (WakeFailed, ServerEnded) as error:
            if self._vitals.role is not Role.PROMOTING:
                raise
            failed = error if isinstance(error, WakeFailed) else WakeFailed(Cause.ENDPOINT, str(error))
            await self._leave.unless_told(self._promoter.roll_back(failed))
        finally:
            self._tell_whoever_asked("it serves no more")

    async def _serve_on(self, port: ServingPort, current: AsyncExitStack, older: OlderPorts) -> NoReturn:
        """``current`` closes ``port``."""
        while True:
            errand = await self._next_errand(port)
            if errand is None:
                self._tell_whoever_asked("it was told to stop meanwhile")
            if errand is not None or self._settings.drain_mode == "handover":
                taken_back = await self._hand_over(port, older, errand)
                if taken_back is not None:
                    port = await self._replace(port, current, older, taken_back)
            if self._leave.told:
                await self._healthy(port, self._drain(port, older))
                raise Leaving

    async def _open(self, ports: AsyncExitStack, sock: socket.socket) -> ServingPort:
        """The serving port under this engine's epoch."""
        epoch, vitals = self._vitals.epoch, self._vitals
        promotion = vitals.promotion
        app = ServingApp(
            FirstToken(
                self._engine.app(),
                since=promotion.bound if promotion else time.monotonic(),
                told=lambda seconds: metrics.record_phase("first_token", seconds),
            ),
            watch_line=lambda seq: vitals.watch_line(seq, epoch=epoch),
            change=vitals.change,
            capacity=self._settings.capacity,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            is_dead=lambda: self._engine.dead,
            on_dead=self._monitor.engine_died,
            tokens=self._tokens,
            also=vitals.older_inflight,
            ended=self._ended,
        )
        vitals.serving = app
        return await ports.enter_async_context(open_port(app, sock, epoch=epoch))

    async def _next_errand(self, port: ServingPort) -> Errand | None:
        """Serve until there is something else to do: a hand-over that somebody asked for, or None, to leave."""
        try:
            return await self._leave.unless_told(self._healthy(port, self._errands.get()))
        except Leaving:
            return None

    async def _healthy(self, port: ServingPort, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, with an eye on engine and server meanwhile.

        Raises:
            EngineDeadError: the engine can serve no more.
        """
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._monitor.watch(port.server.ended))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                watching.result()  # it ends with an error only
            return await doing
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.wait({doing, watching})

    async def _hand_over(self, port: ServingPort, older: OlderPorts, errand: Errand | None) -> socket.socket | None:
        """Hand over. The new listener, if it was taken back; None: nothing was given away.

        Raises:
            Leaving: another engine serves.
            EngineDeadError: the lock is somebody else's, or this engine's memory did not come back.
        """
        if errand is None:
            # Whoever is told to stop together with this engine has heard of it by then, and says so.
            await asyncio.sleep(TOGETHER_SECONDS)
        began, settings = time.monotonic(), self._settings
        handing = HandingOver(
            port,
            older=older.ports,
            budget=lambda: budget(
                began=began,
                asked=errand.asked if errand is not None else None,
                told_at=self._leave.told_at if self._leave.told else None,
                shutdown_seconds=settings.shutdown_timeout_seconds,
                step_seconds=settings.handover_timeout_seconds,
                gone=errand is not None and errand.result.cancelled(),
                waits=settings.drain_mode == "wait",
            ),
            ended=self._ended,
            settings=settings,
            engine=self._engine,
            lock=self._lock,
            vitals=self._vitals,
            promoter=self._promoter,
            key=self._key,
        )
        result = await self._healthy(port, handing.run())
        if errand is not None:
            self._errand = None
            if not errand.result.done():
                errand.result.set_result(result)
        if result.stage is Stage.LOST:
            raise EngineDeadError(f"a hand-over ended with nobody known to serve: {result.reason}")
        if result.stage is Stage.HANDED_OVER:
            for one in (port, *older.ports):
                one.cut()
            raise Leaving
        return handing.sock

    async def _replace(
        self, old: ServingPort, current: AsyncExitStack, older: OlderPorts, sock: socket.socket
    ) -> ServingPort:
        """After a hand-over that was taken back: new requests come under a new epoch; those that there are end where
        they are."""
        closes_old = current.pop_all()
        try:
            port = await self._open(current, sock)
        except BaseException:
            await closes_old.aclose()
            raise
        older.add(old, closes_old)
        self._vitals.change.notify()
        return port

    def _tell_whoever_asked(self, reason: str) -> None:
        """A hand-over that was asked for will not come about."""
        while not self._errands.empty():
            self._errands.get_nowait()
        errand, self._errand = self._errand, None
        if errand is not None and not errand.result.done():
            errand.result.set_result(Result(stage=Stage.KEPT, reason=reason, to="", epoch=0, seconds=0.0))

    async def _drain(self, port: ServingPort, older: OlderPorts) -> None:
        self._vitals.handle(RoleEvent.DRAIN_STARTED)
        in_time = await drain(
            [port, *older.ports],
            settings=self._settings,
            vitals=self._vitals,
            ended=self._ended,
            since=self._leave.told_at,
        )
        self.overran = not in_time
