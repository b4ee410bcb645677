"""One worker as the gateway knows it: an address, and the promotions that answered there."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass

from app.address import Address
from app.fleet.bucket import TokenBucket
from app.fleet.liveness import ReplicaKey, WatchFacts, WorkerState, clears_suspicion, derive_state
from app.fleet.room import Room
from app.fleet.watch import AddressWatch, WatchSession
from app.upstream.pool import UpstreamPool
from workers.contract import WatchLine

HISTORY_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Transition:
    """``monotonic`` is CLOCK_MONOTONIC, comparable across the processes of one machine; ``unix`` the wall clock, which
    may be set."""

    state: WorkerState
    epoch: int | None
    monotonic: float
    unix: float


class Replica:
    """One promotion of a pod, while its watch is open."""

    def __init__(
        self,
        session: WatchSession,
        key: ReplicaKey,
        line: WatchLine,
        pool: UpstreamPool,
        *,
        resumes_per_second: float = 0.0,
    ) -> None:
        self.session = session
        self.key = key
        self.line = line
        self.pool = pool
        self.room = Room()
        self.resumes = TokenBucket(resumes_per_second)
        """Interrupted requests that are sent there."""
        self.line_at = self.steps_at = session.line_at
        self.suspected_at: float | None = None
        self.connected = True

    @property
    def address(self) -> Address:
        return self.pool.address

    def hear(self, line: WatchLine, at: float) -> None:
        if line.steps != self.line.steps:
            self.steps_at = at
        self.line, self.line_at = line, at
        self.room.heard(
            inflight=line.inflight, capacity=line.capacity, refused=line.refused, gateways=line.gateways, now=at
        )
        if self.suspected_at is not None and clears_suspicion(self.suspected_at, at):
            self.suspected_at = None

    def state(self, now: float, heartbeat_timeout: float) -> WorkerState:
        facts = WatchFacts(self.connected, self.line_at, self.suspected_at)
        return derive_state(facts, now=now, heartbeat_timeout=heartbeat_timeout)


class WorkerEntry:
    """One address: its replicas (two during a hand-over) and its history."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.replicas: dict[ReplicaKey, Replica] = {}
        self.last: Replica | None = None
        """The replica heard of last, also when it is gone."""
        self.history: deque[Transition] = deque(maxlen=HISTORY_LENGTH)
        self.timer: asyncio.TimerHandle | None = None
        self.watch: AddressWatch | None = None
        self.task: asyncio.Task[None] | None = None
        self.distrusted_at = -math.inf
        """When it refused our worker token last, under a request."""

    @property
    def current(self) -> Replica | None:
        """The replica that stands for this address: the newest one."""
        return max(self.replicas.values(), key=lambda r: r.key.epoch, default=None)

    def state(self, now: float, heartbeat_timeout: float) -> WorkerState:
        current = self.current
        return WorkerState.DOWN if current is None else current.state(now, heartbeat_timeout)

    def record(self, state: WorkerState, now: float) -> bool:
        replica = self.current or self.last
        epoch = None if replica is None else replica.key.epoch
        if self.history and (self.history[-1].state, self.history[-1].epoch) == (state, epoch):
            return False
        self.history.append(Transition(state, epoch, now, time.time()))
        return True
