"""Requests that wait for a worker: each model has a line of its own, in it those first whose worker broke under them,
the oldest first, and then the others, oldest first.

Whenever something changes that could make room (an own request ended, a watch line came, a worker came up, a pause is
over), places are handed out in that same turn of the loop. A line whose model has no room anywhere is left out at one
look, however long it is, and a request that cannot use what is free (a worker that just broke under it) stands in
nobody's way. Only how many interrupted requests a worker is sent in a second holds up all that is behind them: else new
ones would take the places that those are kept from. What a waiting request keeps is its body.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from app.fleet.registry import WorkerRegistry
from app.openai.errors import queue_full
from app.relay.service_rate import Appointments, ServiceRate


@dataclass(frozen=True, slots=True, eq=False, order=False)
class Waiter:
    """``order``: who is next, the lowest first: the request's age among all, and below all of those for one whose
    worker broke. ``take`` takes a place at a worker if there is one for it."""

    order: int
    model: str
    take: Callable[[float], bool]
    future: asyncio.Future[None]
    returning: bool = False
    """Its worker broke under it."""


@dataclass(slots=True)
class ModelLoad:
    """One model's requests: at workers, and turned away."""

    served: ServiceRate = field(default_factory=ServiceRate)
    appointments: Appointments = field(default_factory=Appointments)


class WaitQueue:
    """``limit``: most requests in a line. Those that were in one before, or at a worker, may always enter."""

    def __init__(self, registry: WorkerRegistry, *, limit: int) -> None:
        self._registry = registry
        self._limit = limit
        self._lines: dict[str, list[Waiter]] = {}
        self._loads: dict[str, ModelLoad] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.waiting = 0
        registry.on_change = self.hand_out

    def load(self, model: str) -> ModelLoad:
        """Of a model that a worker serves, or did."""
        load = self._loads.get(model)
        if load is None:
            known = self._registry.knows
            self._loads = {name: old for name, old in self._loads.items() if old.served.busy or known(name)}
            load = self._loads[model] = ModelLoad()
        return load

    def per_second(self) -> float:
        """Completions to expect, of all models."""
        now = time.monotonic()
        return sum(load.served.per_second(now) for load in self._loads.values())

    def retry_after(self, model: str) -> float:
        """Seconds until a request that is turned away now should be tried again."""
        now = time.monotonic()
        load = self._loads.get(model)
        if load is None:
            load = self.load(model) if self._registry.knows(model) else ModelLoad()
        return load.appointments.make(now, load.served.per_second(now), random.random())  # noqa: S311

    def enter(self, waiter: Waiter, *, new: bool) -> None:
        """Stand in line. Pair with :meth:`leave`.

        Raises:
            GatewayError: 429 ``overloaded``: the line is full.
        """
        if new and not self._admits(waiter.model):
            raise queue_full(self._limit, waiter.model, retry_after=self.retry_after(waiter.model))
        insort(self._lines.setdefault(waiter.model, []), waiter, key=_age)
        self.waiting += 1
        self.hand_out()

    def _admits(self, model: str) -> bool:
        waiting, load = len(self._lines.get(model, ())), self._loads.get(model)
        if load is None:
            return waiting < self._limit
        return load.appointments.admits(time.monotonic(), waiting=waiting, limit=self._limit)

    def leave(self, waiter: Waiter) -> None:
        """Idempotent."""
        line = self._lines.get(waiter.model, [])
        at = bisect_left(line, waiter.order, key=_age)
        if at < len(line) and line[at] is waiter:
            del line[at]
            self.waiting -= 1
            if not line:
                del self._lines[waiter.model]
            if not self.waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def hand_out(self) -> None:
        """Give what is free to whom it serves, oldest first."""
        if not self.waiting:
            return
        now = time.monotonic()
        heads = [(line[0].order, 0, model) for model, line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            _, at, model = heads[0]
            line = self._lines[model]
            if not self._settle(line[at], now):
                heapq.heappop(heads)
            elif at + 1 < len(line):
                heapq.heapreplace(heads, (line[at + 1].order, at + 1, model))
            else:
                heapq.heappop(heads)
        self._set_timer(now)

    def holds_up(self, model: str, now: float) -> bool:
        """Whether somebody in this line has to wait for the pace of interrupted requests, and all behind with him."""
        line = self._lines.get(model)
        return line is not None and line[0].returning and self._paced(model, now)

    def _paced(self, model: str, now: float) -> bool:
        candidates = self._registry.candidates(model)
        return bool(candidates) and not any(replica.resumes.open(now) for replica in candidates)

    def _settle(self, waiter: Waiter, now: float) -> bool:
        """Wake this one if it got a place, or waits for nothing. Whether looking further along its line makes sense."""
        if waiter.future.done():
            return True  # it is about to leave
        candidates = self._registry.candidates(waiter.model)
        if waiter.returning:
            if any(replica.room.open_to_returning(now) for replica in candidates):
                if waiter.take(now):
                    waiter.future.set_result(None)
                    return True
                return not self._paced(waiter.model, now)
        elif any(replica.room.open(now) for replica in candidates):
            if waiter.take(now):
                waiter.future.set_result(None)
            return True
        if not candidates and self._registry.is_unknown(waiter.model):
            waiter.future.set_result(None)
            return True
        return False

    def _set_timer(self, now: float) -> None:
        """Look again when time alone opens a replica."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        replicas = self._registry.candidates("")
        due = [at for replica in replicas if (at := replica.room.opens_at(now)) is not None]
        if any(line[0].returning for line in self._lines.values()):
            due += [at for replica in replicas if (at := replica.resumes.opens_at(now)) > now]
        if due:
            # Timers have whole milliseconds.
            self._timer = asyncio.get_running_loop().call_later(max(0.001, min(due) + 0.001 - now), self._due)

    def _due(self) -> None:
        self._timer = None
        self.hand_out()


def _age(waiter: Waiter) -> int:
    return waiter.order
