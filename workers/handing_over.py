"""The active engine's side of a hand-over: ``workers.handover`` has its stages, here they are gone through.

Nothing is given away before a spare has promised and every answer that runs here can be gone on with there, nothing is
mapped and nothing of an answer leaves while the lock is free, and streams end only when somebody else serves.
Until then this engine can take everything back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from gms.client import GmsError
from workers import metrics
from workers.change import Change
from workers.contract import Role
from workers.engine import RELEASE_SECONDS, Engine, EngineDeadError
from workers.failed_wake import WakeFailed
from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.handover import (
    ANSWER_SECONDS,
    CANCEL_PATH,
    LEAVING,
    OFFER_PATH,
    OUTCOME_PATH,
    PATIENCE_SECONDS,
    SLACK_SECONDS,
    Budget,
    Handover,
    Happening,
    Offer,
    Stage,
    Wait,
)
from workers.hosts import reachable
from workers.http_get import GetFailed, http_post
from workers.in_flight import MOST_NAMED, Request
from workers.offers import answers_of
from workers.pod_key import HEADER_POD_KEY
from workers.promotion import Promoter
from workers.role import RoleEvent
from workers.route_groups import group_of
from workers.serving_port import ServingPort
from workers.settings import EngineSettings
from workers.settling import say_cut, settle
from workers.state import DrainState
from workers.tasks import logged
from workers.vitals import Vitals

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 0.1
"""Between two questions to an engine that gave no answer."""


class _Said(msgspec.Struct, frozen=True):
    """What a spare answers."""

    engine: str = ""
    role: str = ""
    epoch: int = 0
    pid: int = 0
    reason: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a hand-over ended."""

    stage: Stage
    reason: str
    to: str
    """The engine that serves now, if it is not this one."""
    epoch: int
    """Under which epoch it does."""
    seconds: float
    bound: int = 0
    """Requests that stood in the way: no other engine could have gone on with them."""


class HandingOver:
    """One hand-over. ``sock``, once it is taken back: where this engine listens now."""

    def __init__(
        self,
        port: ServingPort,
        *,
        older: Sequence[ServingPort],
        budget: Callable[[], Budget],
        ended: Change,
        settings: EngineSettings,
        engine: Engine,
        lock: FlockFailoverLock,
        vitals: Vitals,
        promoter: Promoter,
        key: str,
    ) -> None:
        """``older``: those of earlier epochs of this engine, with requests still; ``budget``: as things stand;
        ``ended`` tells of the end of any request."""
        self._port = port
        self._apps = [port.app, *(one.app for one in older)]
        self._budget = budget
        self._seconds = settings.handover_timeout_seconds
        """For the step that comes; from the first question to a spare on the same for all."""
        self._ended = ended
        self._settings = settings
        self._engine = engine
        self._lock = lock
        self._vitals = vitals
        self._promoter = promoter
        self._headers = {HEADER_POD_KEY: key}
        self._host = reachable(settings.host)
        self._state = Handover()
        self._promised: dict[int, _Said] = {}
        """Admin port of each spare that promised, and what it said."""
        self._now_active = _Said()
        self._in_the_way = 0
        self._quiet = False
        """No warning is due if no spare takes over: there are no requests here, or the spares have gone or will go."""
        self._began = time.monotonic()
        self.sock: socket.socket | None = None

    async def run(self) -> Result:
        """Go through it, to one of its ends.

        Raises:
            EngineDeadError: this engine can serve no more.
        """
        steps = {
            Stage.SETTLING: self._settle,
            Stage.ASKING: self._ask,
            Stage.QUIESCING: self._quiesce,
            Stage.WAITING: self._await_outcome,
            Stage.RETAKING: self._retake,
            Stage.RESTORING: self._restore,
        }
        while not self._state.over:
            stage, began = self._state.stage, time.monotonic()
            self._say_how_far(stage, left=None, remaining=[at for app in self._apps for at in app.requests.paths()])
            happening, reason = await steps[stage]()
            if reason:
                logger.log(logging.INFO if self._quiet else logging.WARNING, "hand-over, %s: %s", stage, reason)
            metrics.record_handover_stage(stage, time.monotonic() - began)
            self._state.happened(happening, reason)
        self._vitals.draining = None
        return self._result()

    def _result(self) -> Result:
        seconds = time.monotonic() - self._began
        stage, said = self._state.stage, self._now_active
        metrics.record_handover(stage)
        if stage is Stage.HANDED_OVER:
            logger.info(
                "engine %s serves now, under epoch %d: handed over in %.0f ms", said.engine, said.epoch, seconds * 1000
            )
        return Result(
            stage=stage,
            reason=self._state.reason,
            to=said.engine,
            epoch=said.epoch,
            seconds=seconds,
            bound=self._in_the_way,
        )

    def _say_how_far(
        self, stage: Stage, *, left: float | None, remaining: Iterable[str], bound: Sequence[Request] = ()
    ) -> None:
        self._vitals.draining = DrainState(
            phase=stage,
            seconds=time.monotonic() - self._began,
            left_seconds=left,
            remaining=dict(Counter(group_of(path).value for path in remaining)),
            bound=tuple(str(request) for request in bound[:MOST_NAMED]),
            cut=self._budget().cut if stage is Stage.SETTLING else None,
        )

    def _bound(self) -> list[Request]:
        return [request for app in self._apps for request in app.requests.bound_here()]

    # --- the stages

    async def _settle(self) -> tuple[Happening, str]:
        """Serve on until every request can be gone on with elsewhere, as long as there is somebody who would."""

        def tell(bound: Sequence[Request], seconds: float) -> None:
            paths = [request.path for request in bound]
            self._say_how_far(Stage.SETTLING, left=seconds, remaining=paths, bound=bound)

        problem = await settle(
            self._bound,
            budget=self._budget,
            ended=self._ended,
            has_spare=lambda: self._vitals.standby is Role.STANDBY,  # who is asked nevertheless may know better
            tell=tell,
        )
        if problem:
            self._in_the_way = 0 if self._budget().off else len(self._bound())
            return Happening.FAILED, problem
        return Happening.SETTLED, ""

    async def _ask(self) -> tuple[Happening, str]:
        settings, reasons = self._settings, []
        self._seconds = self._budget().step(now=time.monotonic())
        offer = Offer(
            instance=settings.instance,
            engine=settings.engine_id,
            epoch=self._vitals.epoch,
            quiesce_seconds=self._seconds,
        )
        ports, most = settings.standby_admin_ports, max(ANSWER_SECONDS, min(self._seconds, PATIENCE_SECONDS))
        asked = [self._post(port, OFFER_PATH, offer, seconds=most) for port in ports]
        answers = await answers_of(asked, promises=lambda answer: answer[0] == 200, seconds=ANSWER_SECONDS)
        self._seconds = min(self._seconds, self._budget().step(now=time.monotonic()))  # if the answers took their time
        self._promised.clear()
        for admin_port, answer in zip(ports, answers, strict=True):
            if answer is None:
                reasons.append(f"the engine at {admin_port} had not answered when another one would take over")
            elif isinstance(answer, GetFailed):
                reasons.append(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            elif answer[0] == 200:
                self._promised[admin_port] = answer[1]
            else:
                status, said = answer
                reasons.append(f"engine {said.engine or admin_port} does not take over: {said.reason or status}")
        if off := self._budget().off:  # it came while they were asked
            return Happening.FAILED, off
        if not self._promised:
            self._quiet = not self._vitals.inflight or all(_is_gone(answer) for answer in answers)
            return Happening.FAILED, "; ".join(reasons) or "the pod has no other engine"
        for reason in reasons:
            logger.info("hand-over: %s", reason)
        self._vitals.set_standby(Role.STANDBY)  # known better now than by the last look
        return Happening.ACCEPTED, ""

    async def _quiesce(self) -> tuple[Happening, str]:
        # Held first: what nobody said of a request until now, it says too late to be bound here by it.
        app = self._port.app
        app.refuse("it hands over to another engine of its pod")
        for one in self._apps:
            one.hold()
        bound, allowed = self._bound(), self._budget()
        if bound and (not allowed.cut or time.monotonic() < allowed.settle_until):
            self._go_on()
            return Happening.UNSETTLED, ""
        self._vitals.quiesced = False
        self._vitals.handle(RoleEvent.HANDOVER_STARTED)
        seconds = self._seconds
        try:
            await quiesce(self._engine, timeout_seconds=seconds)
        except TimeoutError as error:
            self._go_on()
            self._vitals.handle(RoleEvent.HANDOVER_REVERTED)
            return Happening.FAILED, str(error) or f"its step in hand was not over within {seconds:g} s"
        self._vitals.quiesced = True
        say_cut(bound)
        self._port.server.stop_listening()
        self._lock.release()
        return Happening.QUIESCED, ""

    async def _await_outcome(self) -> tuple[Happening, str]:
        """Until some engine serves, or none of those that promised will."""
        promised = {asyncio.create_task(self._outcome_of(admin_port)) for admin_port in self._promised}
        others = [port for port in self._settings.standby_admin_ports if port not in self._promised]
        other = asyncio.create_task(self._ask_who_serves(others))
        waiting, reasons = {*promised, other}, list[str]()
        try:
            while promised & waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for answer in (task.result() for task in done):
                    if isinstance(answer, _Said):
                        self._now_active = answer
                        return Happening.ACKNOWLEDGED, ""
                    reasons.append(answer)
            return Happening.FAILED, "; ".join(reasons)
        finally:
            for task in (*promised, other):
                task.cancel()
            await asyncio.wait((*promised, other))

    async def _outcome_of(self, admin_port: int) -> _Said | str:
        """Of one that promised: what it says once it serves, or why it does not."""
        seconds = self._seconds
        wait = Wait(epoch=self._port.epoch, seconds=seconds)
        try:
            status, said = await self._post(admin_port, OUTCOME_PATH, wait, seconds=seconds + SLACK_SECONDS)
        except GetFailed as error:
            return str(error)
        return said if status == 200 else f"engine {said.engine} did not take over: {said.reason or status}"

    async def _retake(self) -> tuple[Happening, str]:
        """Whoever has the lock serves: wait until it is this engine's, or somebody says that it has it."""
        ours = asyncio.create_task(self._lock.acquire())
        theirs = asyncio.create_task(self._ask_who_serves(self._settings.standby_admin_ports))
        pressing = asyncio.create_task(self._press())
        logged(pressing, "the spares could not be told that nobody waits for them")
        seconds = 2 * self._seconds + 4 * SLACK_SECONDS
        try:
            await asyncio.wait({ours, theirs}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ours.done():
                ours.result()
                return Happening.GRANTED, ""
            if theirs.done():
                self._now_active = theirs.result()
                return Happening.ACKNOWLEDGED, ""
            return Happening.FAILED, f"another engine holds the lock and does not say that it serves, for {seconds:g} s"
        except FailoverLockError as error:
            return Happening.FAILED, str(error)
        finally:
            for task in (ours, theirs, pressing):
                task.cancel()
            await asyncio.wait({ours, theirs, pressing})

    async def _restore(self) -> tuple[Happening, str]:
        try:
            self.sock = await self._promoter.take()
        except (WakeFailed, GmsError) as error:
            return Happening.FAILED, str(error)
        for app in self._apps:
            app.let_go()
        self._vitals.handle(RoleEvent.HANDOVER_REVERTED)
        return Happening.RESTORED, ""

    # --- what they are made of

    def _go_on(self) -> None:
        """Nothing was given away: serve as before."""
        self._port.app.refuse(None)
        for app in self._apps:
            app.let_go()

    async def _press(self) -> None:
        """Tell the spares that nobody waits for them; one that neither answers nor lets go of the lock is killed."""
        await asyncio.gather(*(self._press_one(admin_port, said) for admin_port, said in self._promised.items()))

    async def _press_one(self, admin_port: int, said: _Said) -> None:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            try:
                await self._post(admin_port, CANCEL_PATH, None, seconds=2 * SLACK_SECONDS)
                return
            except GetFailed:
                await asyncio.sleep(AGAIN_SECONDS)
        if said.pid and self._lock.holder_pid() == said.pid:
            logger.error("engine %s (process %d) holds the lock and is silent: it is killed", said.engine, said.pid)
            _kill(said.pid, still=lambda: self._lock.holder_pid() == said.pid)

    async def _ask_who_serves(self, admin_ports: Iterable[int]) -> _Said:
        """Does not return before one of these engines serves under a higher epoch."""
        asking = [asyncio.create_task(self._until_it_serves(admin_port)) for admin_port in admin_ports]
        if not asking:
            await asyncio.Event().wait()
        try:
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in asking if task.done()).result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)

    async def _until_it_serves(self, admin_port: int) -> _Said:
        wait = Wait(epoch=self._port.epoch, seconds=SLACK_SECONDS)
        while True:
            try:
                status, said = await self._post(admin_port, OUTCOME_PATH, wait, seconds=2 * SLACK_SECONDS)
                if status == 200:
                    return said
            except GetFailed:
                pass
            await asyncio.sleep(AGAIN_SECONDS)

    async def _post(self, admin_port: int, path: str, document: object, *, seconds: float) -> tuple[int, _Said]:
        status, body = await http_post(
            self._host, admin_port, path, msgspec.json.encode(document), timeout_seconds=seconds, headers=self._headers
        )
        try:
            return status, msgspec.json.decode(body, type=_Said)
        except msgspec.DecodeError:
            return status, _Said()


async def quiesce(engine: Engine, *, timeout_seconds: float, release_seconds: float = RELEASE_SECONDS) -> None:
    """``engine.quiesce``, with an end.

    Raises:
        TimeoutError: it serves on.
        EngineDeadError: its pages were not released, or it does not say. What hangs is not waited for.
    """
    most = timeout_seconds + release_seconds + SLACK_SECONDS
    quiescing = asyncio.ensure_future(engine.quiesce(timeout_seconds=timeout_seconds))
    try:
        done, _ = await asyncio.wait({quiescing}, timeout=most)
        if not done:
            raise EngineDeadError(f"the engine neither came to rest nor went on within {most:g} s")
        quiescing.result()
    finally:
        quiescing.cancel()


def _is_gone(answer: tuple[int, _Said] | BaseException | None) -> bool:
    if answer is None:
        return False
    if isinstance(answer, BaseException):
        return isinstance(answer.__cause__, ConnectionRefusedError | ConnectionResetError)
    return answer[1].reason == LEAVING


def _kill(pid: int, *, still: Callable[[], bool]) -> None:
    """SIGKILL, if the process behind the pid is the one that is meant now, too."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if still():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError as error:
        logger.error("it cannot be killed: %s", error.strerror)
    finally:
        os.close(pidfd)
