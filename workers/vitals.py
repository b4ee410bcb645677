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
from workers.contract import Role, WatchLine
from workers.engine import Engine
from workers.heartbeat import Beat
from workers.role import RoleEvent, RoleMachine
from workers.serving import Change, ServingApp
from workers.settings import EngineSettings
from workers.state import service_link

logger = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """Who keeps this engine: the keeper's pid, and how many engines it has forked before this one."""

    keeper_pid: int
    restarts: int


class Vitals:
    """One engine's facts. ``change`` tells waiting watches that something worth a line has happened."""

    def __init__(self, settings: EngineSettings, engine: Engine, *, kept: Kept | None) -> None:
        self._settings = settings
        self._engine = engine
        self._kept = kept
        self._machine = RoleMachine(now=time.monotonic())
        self.change = Change()
        self.role_change = Change()
        self.epoch = 0
        self.promotion: Promotion | None = None
        self.serving: ServingApp | None = None
        self.standby: Role | None = None
        self.failure: str | None = None
        metrics.record_role(self._machine.role)

    @property
    def role(self) -> Role:
        return self._machine.role

    @property
    def initialized(self) -> bool:
        """Before this the engine can be asked nothing."""
        return self._machine.role is not Role.INIT and bool(self._engine.models)

    @property
    def inflight(self) -> int:
        return self.serving.inflight if self.serving else 0

    def handle(self, event: RoleEvent) -> None:
        """Move the role machine on, and let everybody know."""
        role = self._machine.handle(event, now=time.monotonic())
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
        return Beat(self._engine.steps, self._engine.busy, self.role)

    def watch_line(self, seq: int) -> WatchLine:
        """For the gateways."""
        settings = self._settings
        return WatchLine(
            worker=settings.pod,
            instance=settings.instance,
            epoch=self.epoch,
            engine=settings.engine_id,
            state=self.role,
            models=self._engine.models,
            inflight=self.inflight,
            capacity=settings.capacity,
            steps=self._engine.steps,
            seq=seq,
            standby=self.standby,
            kv_usage=self._engine.kv_usage(),
            refused=self.serving.refused if self.serving else 0,
            gateways=self.serving.watches if self.serving else 0,
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
            keeper_pid=self._kept.keeper_pid if self._kept else None,
            restarts=self._kept.restarts if self._kept else 0,
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
            failure=self.failure,
        )


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
