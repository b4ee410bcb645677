"""What the gateway knows of its workers, as it is now.

One ``WorkerEntry`` per address, one ``Replica`` per (worker, instance, epoch) that has a live watch. States are derived
(``liveness``) whenever a fact changes; the list of who is routable is recomputed then and not per request. Whoever
hands out workers to waiting requests (``on_change``) is told in that same turn of the loop.

Addresses come and go (:meth:`WorkerRegistry.follow`). One that went gets no new requests; its watch, which tells of its
death, and its connections stay until the streams that run on it have ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence, Set
from types import TracebackType
from typing import Self

from app.address import Address
from app.fleet.deaths import Deaths, Fate
from app.fleet.liveness import ReplicaFacts, ReplicaKey, WorkerState, routable_keys
from app.fleet.recovery_times import recovery_times
from app.fleet.replica import Replica, WorkerEntry
from app.fleet.watch import AddressWatch, WatchSession
from app.fleet.worker_token import WorkerToken
from app.log_fields import fields
from app.upstream.pool import UpstreamPool
from workers.contract import Role, WatchLine

logger = logging.getLogger(__name__)

REMEMBERED_SECONDS = 60.0
"""So long the models of a worker that is down still count as known: its requests wait instead of getting a 404."""


class WorkerRegistry:
    """Use as ``async with``: watches run inside."""

    def __init__(
        self,
        addresses: Sequence[Address] = (),
        *,
        connect_timeout: float,
        heartbeat_timeout: float,
        token: WorkerToken | None = None,
        resumes_per_second: float = 0.0,
        returning_seconds: float = 0.0,
    ) -> None:
        """``addresses``: those known from the start; :meth:`follow` gives others. ``resumes_per_second``: of
        interrupted requests, for each worker; 0: no limit. ``returning_seconds``: new requests leave a worker that was
        just promoted to interrupted ones for so long at most: not all gateways for the same time, for they know nothing
        of each other's."""
        self.entries = {address: WorkerEntry(address) for address in addresses}
        self._connect_timeout = connect_timeout
        self._heartbeat_timeout = heartbeat_timeout
        self._leaving: set[WorkerEntry] = set()
        """Entries whose address went, while streams run on them."""
        self._departed: dict[tuple[str, ...], float] = {}
        """What workers served whose address is gone, and when they were last heard of."""
        self._open = False
        self._token = token or WorkerToken()
        self._resumes_per_second = resumes_per_second
        self._returning_seconds = returning_seconds
        self._deaths = Deaths()
        self._curious: list[asyncio.Future[None]] = []
        self._closing = False
        self.on_change: Callable[[], None] | None = None
        """Called at each change of a fact about any worker, once all conclusions are drawn."""
        self.on_recovery: Callable[[str, float], None] | None = None
        """Called when a promotion follows an engine's death, with each phase of that (``recovery_times``)."""
        self.nobody_since: float | None = time.monotonic()
        """When the last routable worker went, or this began; ``None``: some worker is routable."""
        self._routable: dict[ReplicaKey, Replica] = {}
        self._by_model: dict[str, tuple[Replica, ...]] = {"": ()}

    async def __aenter__(self) -> Self:
        self._open = True
        for entry in self.entries.values():
            self._watch(entry)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        entries = [*self.entries.values(), *self._leaving]
        tasks = [entry.task for entry in entries if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in entries:
            if entry.timer is not None:
                entry.timer.cancel()
            for replica in list(entry.replicas.values()):
                replica.pool.close()

    def _watch(self, entry: WorkerEntry) -> None:
        entry.watch = AddressWatch(
            entry.address,
            self,
            connect_timeout=self._connect_timeout,
            heartbeat_timeout=self._heartbeat_timeout,
            token=self._token,
        )
        entry.task = asyncio.create_task(entry.watch.run())

    # Which workers there are

    def follow(self, addresses: Sequence[Address]) -> None:
        """From now on these are the workers, in this order. An address that comes back is a new worker."""
        before = self.entries
        self.entries = {address: before.get(address) or WorkerEntry(address) for address in addresses}
        for address, entry in self.entries.items():
            if self._open and address not in before:
                self._watch(entry)
        for address, entry in before.items():
            if address not in self.entries:
                self._leave(entry)
        self._recompute(time.monotonic())
        self._wake()

    async def tried(self) -> None:
        """Returns once each address that is known now was tried."""
        for entry in list(self.entries.values()):
            if entry.watch is not None:
                await asyncio.shield(entry.watch.tried)
                if not entry.replicas and entry.watch.wanted:
                    logger.info("worker %s is not there yet", entry.address)

    def _leave(self, entry: WorkerEntry) -> None:
        if entry.last is not None:
            at = time.monotonic() if entry.replicas else entry.last.line_at
            self._departed[entry.last.line.models] = at
        self._leaving.add(entry)
        if entry.watch is not None:
            entry.watch.leave()
        for replica in list(entry.replicas.values()):
            replica.pool.finish(lambda: self._left(entry))
        self._left(entry)

    def _left(self, entry: WorkerEntry) -> None:
        """Drop an entry that leaves, if no stream runs on it any more."""
        if self._closing or entry not in self._leaving or any(r.pool.busy for r in entry.replicas.values()):
            return
        self._leaving.discard(entry)
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        entry.replicas.clear()
        if entry.task is not None:
            entry.task.cancel()
        logger.info("worker %s was removed", entry.address)

    # What requests ask

    @property
    def heartbeat_timeout(self) -> float:
        return self._heartbeat_timeout

    def candidates(self, model: str) -> tuple[Replica, ...]:
        """Routable replicas that serve the model; with an empty name, all routable ones."""
        return self._by_model.get(model, ())

    def fate(self, replica: Replica, broke_at: float) -> Fate:
        """What became of the engine that a connection broke to."""
        return self._deaths.fate(replica.key, broke_at, line_at=replica.line_at, connected=replica.connected)

    def changed(self) -> asyncio.Future[None]:
        """Done at the next change of a fact about any worker."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._curious.append(future)
        return future

    def served_models(self) -> Set[str]:
        """Models that a routable worker serves."""
        return self._by_model.keys() - {""}

    def is_routable(self, replica: Replica) -> bool:
        return self._routable.get(replica.key) is replica

    def is_unknown(self, model: str) -> bool:
        """Whether a request for this model has nothing to wait for: workers are routable, none is known to serve it."""
        if not model or not self._routable or model in self._by_model:
            return False
        return not self.knows(model)

    @property
    def mixed(self) -> bool:
        """Whether workers serve different models, so that a request must name one. Names that all of them serve are
        names of one model, or of one with its adapters."""
        return len(self._known()) > 1

    def knows(self, model: str) -> bool:
        """Whether a worker serves this model, or did a minute ago: bounds the values of a metric's label."""
        return bool(model) and (model in self._by_model or model in self.known_models())

    def known_models(self) -> set[str]:
        """Models of reachable workers, and of those that went away less than a minute ago."""
        return {model for models in self._known() for model in models}

    def _known(self) -> set[tuple[str, ...]]:
        """The models of each worker that is reachable, or went away less than a minute ago."""
        oldest = time.monotonic() - REMEMBERED_SECONDS
        found = {
            entry.last.line.models
            for entry in self.entries.values()
            if entry.last is not None and (entry.replicas or entry.last.line_at >= oldest)
        }
        if self._departed:
            self._departed = {models: at for models, at in self._departed.items() if at >= oldest}
            found.update(self._departed)
        return found

    def reachable_models(self) -> dict[str, int]:
        """Models of the workers that have a watch now, in the order of the workers, and how long a request and its
        answer may be there in tokens: at the worker where that is least, since any of them may get it. 0: none says."""
        found: dict[str, int] = {}
        for entry in self.entries.values():
            for replica in entry.replicas.values():
                said = replica.line.max_model_len
                for model in replica.line.models:
                    known = found.get(model, 0)
                    found[model] = min(known, said) if known and said else known or said
        return found

    def problem(self, entry: WorkerEntry) -> str:
        """Why this worker is not used, as far as it is known and somebody can mend it; else empty."""
        if time.monotonic() - entry.distrusted_at < REMEMBERED_SECONDS:
            return self._token.refused
        return "" if entry.watch is None else entry.watch.problem

    # What happens to workers

    def distrusted(self, replica: Replica) -> None:
        """It answered a request with 401: our worker token is not its. Said at most once a minute."""
        entry = self.entries.get(replica.address)
        if entry is None:
            return
        now = time.monotonic()
        if now - entry.distrusted_at >= REMEMBERED_SECONDS:
            entry.distrusted_at = now
            logger.warning("worker %s is not usable: %s", entry.address, self._token.refused)

    def watch_line(self, session: WatchSession, key: ReplicaKey, line: WatchLine) -> bool:
        entry = self._entry_of(session)
        if entry is None:
            return False
        replica = entry.replicas.get(key)
        if replica is None:
            pool = UpstreamPool(
                session.address,
                connect_timeout=self._connect_timeout,
                on_break=lambda: self._suspect(entry, session),
            )
            replica = Replica(session, key, line, pool, resumes_per_second=self._resumes_per_second)
            if self._returning_seconds and entry.last is not None and entry.last.key[:2] == key[:2]:
                spread = random.random()  # noqa: S311
                replica.room.leave_until(session.line_at + self._returning_seconds * spread)
            entry.replicas[key] = replica
            self._note_recovery(entry, replica)
        elif replica.session is not session:
            return False
        replica.hear(line, session.line_at)
        entry.last = replica
        self._update(entry)
        return True

    def _note_recovery(self, entry: WorkerEntry, replica: Replica) -> None:
        """The first line of a promotion: if it follows a death, how long that took."""
        before = entry.last
        if self.on_recovery is None or before is None or before.key[:2] != replica.key[:2]:
            return
        fate = self._deaths.fate(before.key, before.suspected_at or 0.0, line_at=0.0, connected=False)
        if fate is Fate.DIED and replica.line.state is Role.ACTIVE:
            states = [(transition.state, transition.monotonic) for transition in entry.history]
            for phase, seconds in recovery_times(
                states, line_at=replica.line_at, lock_seconds=replica.line.lock_seconds
            ).items():
                self.on_recovery(phase, seconds)

    def watch_gone(self, session: WatchSession) -> None:
        entry = self._entry_of(session)
        replica = None if session.key is None or entry is None else entry.replicas.get(session.key)
        if self._closing or entry is None or replica is None or replica.session is not session:
            return
        now = replica.suspected_at = time.monotonic()
        if replica.line.state is Role.ACTIVE and not session.problem:
            self._deaths.add(replica.key, now)
        self._update(entry)
        replica.connected = False
        del entry.replicas[replica.key]
        self._update(entry)
        replica.pool.retire()
        self._left(entry)

    def _entry_of(self, session: WatchSession) -> WorkerEntry | None:
        for entry in self._leaving:
            if any(replica.session is session for replica in entry.replicas.values()):
                return entry
        return self.entries.get(session.address)

    def _suspect(self, entry: WorkerEntry, session: WatchSession) -> None:
        """A stream of this worker broke."""
        for replica in entry.replicas.values():
            if replica.session is session:
                replica.suspected_at = time.monotonic()
                self._update(entry)
                return

    def _update(self, entry: WorkerEntry) -> None:
        """A fact about this address changed: conclude anew, and wake whom it concerns."""
        now = time.monotonic()
        state = entry.state(now, self._heartbeat_timeout)
        if entry.record(state, now):
            current = entry.current or entry.last
            said = None if current is None else current.key
            logger.info(
                "worker %s is %s",
                entry.address,
                state.value,
                extra=fields(worker=said and said.worker, epoch=said and said.epoch),
            )
        self._set_timer(entry, state)
        self._recompute(now)
        if entry.watch is not None:
            entry.watch.poke()
        self._wake()

    def _recompute(self, now: float) -> None:
        replicas = [replica for entry in self.entries.values() for replica in entry.replicas.values()]
        facts = [ReplicaFacts(r.key, r.state(now, self._heartbeat_timeout), r.line.state) for r in replicas]
        keys = routable_keys(facts)
        routable = [replica for replica in replicas if replica.key in keys]
        self._routable = {replica.key: replica for replica in routable}
        if routable:
            self.nobody_since = None
        elif self.nobody_since is None:
            self.nobody_since = now
        by_model: dict[str, list[Replica]] = {}
        for replica in routable:
            for model in replica.line.models:
                by_model.setdefault(model, []).append(replica)
        self._by_model = {model: tuple(found) for model, found in by_model.items()}
        self._by_model[""] = tuple(routable)

    def _set_timer(self, entry: WorkerEntry, state: WorkerState) -> None:
        """Look again when the next heartbeat is overdue."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        current = entry.current
        if current is not None and state is WorkerState.UP:
            due = current.line_at + self._heartbeat_timeout - time.monotonic()
            entry.timer = asyncio.get_running_loop().call_later(max(0.001, due + 0.001), self._update, entry)

    def _wake(self) -> None:
        if self._curious:
            curious, self._curious = self._curious, []
            for future in curious:
                if not future.done():
                    future.set_result(None)
        if self.on_change is not None:
            self.on_change()
