"""What is known of one engine's life at this moment, and the three forms in which others get it.

``workers.life`` writes the facts; the admin port, the watch and the keeper read them from here and nowhere else:
everything that can be derived (in flight, whether memory can be asked for) is derived when somebody asks.
"""

from __future__ import annotations

import logging
import os
import resource
import time

import msgspec

from workers import metrics
from workers.admin import EngineState, Promotion
from workers.change import Change
from workers.contract import Role, WatchLine
from workers.engine import Engine
from workers.heartbeat import Beat
from workers.role import RoleEvent, RoleMachine
from workers.self_test import SelfTests
from workers.serving import ServingApp
from workers.settings import EngineSettings
from workers.state import DrainState, service_link

logger = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """Who keeps this engine: the keeper's pid, if there is one; and how many were here before it in the pod's life."""

    keeper_pid: int | None
    restarts: int


class Vitals:
    """One engine's facts. ``change`` tells waiting watches that something worth a line has happened."""

    def __init__(self, settings: EngineSettings, engine: Engine, *, kept: Kept) -> None:
        self._settings = settings
        self._engine = engine
        self._kept = kept
        self._machine = RoleMachine(now=time.monotonic())
        self.change = Change()
        self.role_change = Change()
        self.epoch = 0
        self.promotion: Promotion | None = None
        self.serving: ServingApp | None = None
        self.older: list[ServingApp] = []
        """Those of earlier epochs of this engine, whose requests go on after a hand-over that came to nothing."""
        self.rollbacks = 0
        """Promotions that were taken back."""
        self.quiesced = False
        """In HANDOVER: its pages have been given away, and no step is due."""
        self.draining: DrainState | None = None
        self.standby: Role | None = None
        self.failure: str | None = None
        self.self_tests = SelfTests(
            interval_seconds=settings.self_test_seconds, timeout_seconds=settings.self_test_timeout_seconds
        )
        self.obstacle: str | None = None
        """Why the last promotion failed, until one succeeds."""
        self._initialized = False
        metrics.record_role(self._machine.role)

    @property
    def role(self) -> Role:
        return self._machine.role

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def initialized(self) -> bool:
        """Before this the engine can be asked nothing; one that was stopped while it initialised never can."""
        return self._initialized

    @property
    def inflight(self) -> int:
        current = self.serving.inflight if self.serving else 0
        return current + self.older_inflight()

    def older_inflight(self) -> int:
        """Requests from before a hand-over that came to nothing."""
        return sum(serving.inflight for serving in self.older)

    def handle(self, event: RoleEvent) -> None:
        """Move the role machine on, and let everybody know."""
        role = self._machine.handle(event, now=time.monotonic())
        self._initialized |= event is RoleEvent.INITIALIZED
        self.rollbacks += event is RoleEvent.PROMOTION_ROLLED_BACK
        metrics.record_role(role)
        logger.debug("engine %s is %s", self._settings.engine_id, role)
        self.change.notify()
        self.role_change.notify()

    def fail(self, reason: str) -> None:
        """The engine cannot go on; ``reason`` is a sentence."""
        logger.error("engine %s cannot go on: %s", self._settings.engine_id, reason)
        self.failure = reason
        self.handle(RoleEvent.FAILED)

    def set_standby(self, role: Role | None) -> None:
        """What the pod's other engine is."""
        if role is not self.standby:
            self.standby = role
            self.change.notify()

    def beat(self) -> Beat:
        """For the keeper."""
        if not self.initialized:
            return Beat(0, False, self.role)
        # One that has given its pages away keeps its requests, and makes no step. Until then a step may be in hand.
        given_away = self.role is Role.HANDOVER and self.quiesced
        return Beat(self._engine.steps, self._engine.busy and not given_away, self.role)

    def watch_line(self, seq: int, *, epoch: int) -> WatchLine:
        """For the gateways, on a watch that was opened under ``epoch``. An earlier one has been handed over for good:
        requests of before are still answered, and new ones have to come under the epoch that there is now."""
        settings = self._settings
        return WatchLine(
            worker=settings.pod,
            instance=settings.instance,
            epoch=epoch,
            engine=settings.engine_id,
            state=self.role if epoch == self.epoch else Role.HANDOVER,
            models=self._engine.models,
            inflight=self.inflight,
            capacity=settings.capacity,
            steps=self._engine.steps,
            seq=seq,
            standby=self.standby,
            kv_usage=self._engine.kv_usage(),
            refused=self.serving.refused if self.serving else 0,
            gateways=self.serving.watches if self.serving else 0,
            max_model_len=self._engine.max_model_len,
            lock_seconds=time.monotonic() - self.promotion.granted if self.promotion else -1.0,
        )

    def state(self) -> EngineState:
        """For people and supervisors, on the admin port."""
        settings, now = self._settings, time.monotonic()
        initialized = self.initialized
        return EngineState(
            worker=settings.pod,
            instance=settings.instance,
            engine=settings.engine_id,
            role=self.role,
            role_seconds=now - self._machine.since,
            pid=os.getpid(),
            keeper_pid=self._kept.keeper_pid,
            restarts=self._kept.restarts,
            epoch=self.epoch,
            inflight=self.inflight,
            capacity=settings.capacity,
            steps=self._engine.steps if initialized else 0,
            models=self._engine.models if initialized else (),
            standby=self.standby,
            memory=self._engine.memory() if initialized else None,
            memory_service=service_link(self._engine.custody()) if initialized else None,
            rss_bytes=_rss_bytes(),
            monotonic=now,
            promotion=self.promotion,
            draining=self.draining,
            failure=self.failure,
            self_test=self.self_tests.report(now=now) if self.role is Role.STANDBY else None,
            obstacle=self.obstacle,
        )


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
