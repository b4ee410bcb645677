"""Random histories against what must always hold, whatever the rules say in detail.

The model knows processes and what each may still have mapped; the arbiter knows connections only. Restarts of the
service, broken connections, corruption and eviction are part of the histories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gms.arbiter import Arbiter, staged
from gms.leases import Action, Drop, Grant, PoolState, Refuse, Request
from gms.protocol import ErrorCode, LeaseMode

C = TypeVar("C")
RW, RO = LeaseMode.RW, LeaseMode.RO
PROCESSES = st.integers(0, 3)
POOLS = st.sampled_from(["weights/a", "kv", "weights/b"])
WEIGHTS = st.sampled_from(["weights/a", "weights/b"])
PICK = st.integers(0, 11)  # which of those that there are, so that few steps are idle
WAIT = st.integers(1, 9).map(lambda seconds: seconds % 9)


@dataclass
class Process:
    """`connection` is None while it has none; `earlier` are those that broke. `kept` is what it could hand back:
    pool -> mode, generation, epoch."""

    connection: int | None
    earlier: list[int] = field(default_factory=list)
    kept: dict[str, tuple[LeaseMode, int, int]] = field(default_factory=dict)


class ArbiterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter()
        self.now = 0.0
        self.counter = 0
        self.processes = [Process(self.number()) for _ in range(4)]
        self.waiting: dict[int, Request] = {}
        self.leases: dict[tuple[int, str], tuple[LeaseMode, int]] = {}
        self.writable: dict[tuple[str, int], list[Process]] = {}
        self.given: set[tuple[str, int]] = set()
        self.dropped: set[tuple[str, int]] = set()
        self.unreturned: set[tuple[str, int]] = set()  # pages of an earlier service: this one never had them
        self.fences: dict[str, int] = {}

    def number(self) -> int:
        self.counter += 1
        return self.counter

    def behind(self, connection: int) -> Process:
        return next(process for process in self.processes if process.connection == connection)

    def free(self) -> list[tuple[Process, int]]:
        """Processes that have a connection, and no request under way on it."""
        busy = {request.client for request in self.waiting.values()}
        return [(p, p.connection) for p in self.processes if p.connection is not None and p.connection not in busy]

    def holding(self, mode: LeaseMode | None = None) -> list[tuple[Process, int, str]]:
        """Leases of those, only those on weights if a mode is given."""
        return [
            (process, connection, pool)
            for process, connection in self.free()
            for (holder, pool), (held, _) in self.leases.items()
            if holder == connection and (mode is None or (held is mode and staged(pool)))
        ]

    def picked(self, candidates: list[C], pick: int) -> C:
        return candidates[pick % len(candidates)]

    # --- clients

    @precondition(lambda self: self.free())
    @rule(pick=PICK, pool=WEIGHTS, mode=st.sampled_from(LeaseMode), wait=WAIT)
    def attach_weights(self, pick: int, pool: str, mode: LeaseMode, wait: int) -> None:
        self.attach(pick, pool, mode, 0, wait)

    @precondition(lambda self: self.free())
    @rule(pick=PICK, ahead=st.integers(-1, 2), wait=WAIT)
    def attach_kv(self, pick: int, ahead: int, wait: int) -> None:
        self.attach(pick, "kv", RW, max(self.fences.get("kv", 0) + ahead, 0), wait)

    @precondition(lambda self: self.free())
    @rule(pick=PICK, pool=WEIGHTS)
    def write_at_once(self, pick: int, pool: str) -> None:
        """Else hardly anything is ever committed."""
        self.attach(pick, pool, RW, 0, 9)
        if self.holding(RW):
            self.commit(pick)

    def attach(self, pick: int, pool: str, mode: LeaseMode, epoch: int, wait: int) -> None:
        process, connection = self.picked(self.free(), pick)
        self.arbiter.inherit(pool, frozenset(process.earlier), connection)
        assert not any(self.arbiter.suspected(earlier, pool) for earlier in process.earlier)
        request = Request(self.number(), connection, f"engine {connection}", pool, mode, epoch, self.now + wait)
        self.waiting[request.key] = request
        actions = self.arbiter.attach(request)
        if not staged(pool) and mode is RW and not any(self.refused(a, request) for a in actions):
            self.fences[pool] = max(self.fences.get(pool, 0), epoch)
        self.apply(actions)

    @precondition(lambda self: self.holding())
    @rule(pick=PICK, quiesced=st.booleans())
    def release(self, pick: int, quiesced: bool) -> None:
        process, connection, pool = self.picked(self.holding(), pick)
        if quiesced:
            self.unmap(process, pool)
        self.leases.pop((connection, pool), None)
        process.kept.pop(pool, None)
        self.apply(self.arbiter.release(connection, pool, quiesced))
        assert self.arbiter.lease(connection, pool) is None

    @precondition(lambda self: self.holding(RW))
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        process, connection, pool = self.picked(self.holding(RW), pick)
        generation = self.leases[connection, pool][1]
        self.writable[pool, generation].remove(process)  # the backend checked that it unmapped
        self.leases[connection, pool] = RO, generation
        process.kept[pool] = RO, generation, 0
        self.apply(self.arbiter.commit(connection, pool))
        assert self.arbiter.standing(pool) == generation
        assert not self.arbiter.pools[pool].corrupt

    def hang_up(self, index: int) -> None:
        """The connection breaks, the process and its mappings live on."""
        process = self.processes[index]
        if process.connection is not None:
            self.disconnect(process, proof=False)

    @precondition(lambda self: any(process.connection is None for process in self.processes))
    @rule(pick=PICK)
    def reconnect(self, pick: int) -> None:
        self.picked([p for p in self.processes if p.connection is None], pick).connection = self.number()

    def die(self, index: int) -> None:
        """Its place is taken by a new process."""
        process = self.processes[index]
        self.unmap(process, None)
        if process.connection is not None:
            self.disconnect(process, proof=True)
        for connection in process.earlier:
            self.leave(connection, proof=True)
        assert not any(self.arbiter.suspected(connection) for connection in process.earlier)
        self.processes[index] = Process(self.number())

    def keeping(self) -> list[tuple[Process, int, str]]:
        """Those who have pages mapped that they have no lease on."""
        return [(p, c, pool) for p, c in self.free() for pool in p.kept if (c, pool) not in self.leases]

    @precondition(lambda self: self.keeping())
    @rule(pick=PICK)
    def hand_back(self, pick: int) -> None:
        """What the service does with Adopt, when all pages are what they should be."""
        process, connection, pool = self.picked(self.keeping(), pick)
        mode, generation, epoch = process.kept[pool]
        self.arbiter.inherit(pool, frozenset(process.earlier), connection)
        found = self.arbiter.pools.get(pool)
        if found is None or generation not in (found.standing, *found.awaited):
            return
        if not staged(pool) and epoch == found.lease_epoch:
            assert found.may_return(connection)
        if staged(pool):
            if mode is RW and generation != found.standing:
                self.arbiter.write_on(connection, pool)
            elif mode is RW or generation in found.condemned:
                return
            else:
                if generation in found.awaited:
                    self.apply(self.arbiter.adopted(pool, 0))
                self.arbiter.rejoin(connection, pool)
        else:
            if epoch != found.lease_epoch or not found.may_return(connection):
                return
            assert all(other is process for other in self.writable[pool, generation])
            self.apply(self.arbiter.adopted(pool, connection))
        assert (pool, generation) not in self.dropped
        self.unreturned.discard((pool, generation))
        self.leases[connection, pool] = mode, generation

    @rule(
        index=PROCESSES,
        what=st.sampled_from(
            ["hang_up"] * 3
            + ["die"] * 2
            + ["service_starts_again"] * 2
            + ["something_is_found_corrupt", "memory_is_short", "no_more_comes_back", "kv_for_reading"]
        ),
    )
    def disruption(self, index: int, what: str) -> None:
        """One rule for all of these, since each is to be seldom."""
        getattr(self, what)(index)

    def kv_for_reading(self, index: int) -> None:
        if self.free():
            self.attach(index, "kv", [RO, LeaseMode.RW_OR_RO][index % 2], 9, 1)

    # --- the service

    @rule(seconds=st.integers(1, 2))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.apply(self.arbiter.expire(self.now))
        assert all(request.deadline > self.now for request in self.waiting.values())

    def something_is_found_corrupt(self, index: int) -> None:
        pool = f"weights/{'ab'[index % 2]}"
        wrong = self.arbiter.standing(pool)
        self.apply(self.arbiter.condemn(pool, "changed"))
        assert wrong == 0 or self.arbiter.standing(pool) == 0

    def memory_is_short(self, index: int) -> None:
        actions = self.arbiter.evict()
        for action in actions:
            assert isinstance(action, Drop)
            assert not any(pool == action.pool for _, pool in self.leases)
            assert not any(request.pool == action.pool for request in self.waiting.values())
        self.apply(actions)

    def no_more_comes_back(self, index: int) -> None:
        for pool, generation in self.arbiter.awaited():
            self.apply(self.arbiter.settle(pool, generation))
        assert not self.arbiter.awaited()

    def service_starts_again(self, index: int) -> None:
        """It knows of each pool what its journal says: what stood, the epochs, and who lives."""
        before = self.arbiter
        self.arbiter = Arbiter(after=before.last_generation)
        for name, pool in before.pools.items():
            alive = {process.kept.get(name, (RW, 0, 0))[1] for process in self.processes}
            adopting = pool.standing if pool.standing in alive else 0
            self.unreturned.add((name, adopting))
            if not staged(name):
                self.arbiter.restore_kv(name, adopting=adopting, fence=pool.epoch, lease_epoch=pool.lease_epoch)
                continue
            writing = next((held.generation for held in pool.held() if held.mode is RW), 0)
            returning = writing if index % 2 else 0  # it had asked for its commit, or had not
            self.unreturned.add((name, returning))
            condemned = {wrong: reason for wrong, reason in pool.condemned.items() if wrong in alive}
            if adopting or returning or condemned:
                self.arbiter.restore_weights(
                    name,
                    adopting=adopting,
                    returning=returning,
                    corrupt=condemned[max(condemned)] if condemned and not adopting else "",
                    condemned=condemned,
                )
        for process in self.processes:
            if process.connection is not None:
                process.earlier.append(process.connection)
                process.connection = self.number()
        self.waiting.clear()
        self.leases.clear()

    # --- what follows

    def refused(self, action: Action, request: Request) -> bool:
        return isinstance(action, Refuse) and action.request is request

    def disconnect(self, process: Process, proof: bool) -> None:
        connection = process.connection
        assert connection is not None
        process.connection = None
        process.earlier.append(connection)
        self.waiting = {key: r for key, r in self.waiting.items() if r.client != connection}
        self.leases = {key: lease for key, lease in self.leases.items() if key[0] != connection}
        self.leave(connection, proof)

    def leave(self, connection: int, proof: bool) -> None:
        for pool in list(self.arbiter.pools):
            self.apply(self.arbiter.release(connection, pool, proof))

    def unmap(self, process: Process, pool: str | None) -> None:
        for (name, _), mapped in self.writable.items():
            if pool in (None, name) and process in mapped:
                mapped.remove(process)

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant():
                    self.granted(action)
                case Refuse(request=request):
                    assert self.waiting.pop(request.key) is request
                    if action.code == ErrorCode.STALE_EPOCH:
                        assert request.epoch <= self.fences[request.pool]
                case Drop(pool=pool, generation=generation):
                    assert (pool, generation) in self.given
                    assert (pool, generation) not in self.dropped
                    assert (pool, generation) not in {(p, g) for (_, p), (_, g) in self.leases.items()}
                    assert not self.writable.get((pool, generation)) or (pool, generation) in self.unreturned
                    self.dropped.add((pool, generation))

    def granted(self, grant: Grant) -> None:
        assert grant.generation not in self.arbiter.pools[grant.request.pool].awaited
        request, pool, key = grant.request, grant.request.pool, (grant.request.pool, grant.generation)
        assert self.waiting.pop(request.key) is request
        assert key not in self.dropped
        process = self.behind(request.client)
        if grant.mode is RO:
            assert staged(pool)
            assert request.mode is not RW
            assert grant.generation == self.arbiter.standing(pool)
            assert not self.arbiter.pools[pool].corrupt
            assert not self.writable.get(key)
        else:
            assert request.mode is not RO
            assert all(other is process for other in self.writable.setdefault(key, []))
            self.writable[key] = [process]
            if staged(pool):
                assert key not in self.given
                earlier = [r for r in self.waiting.values() if r.pool == pool and r.mode is not RO]
                assert all(r.key > request.key for r in earlier)
            else:
                assert request.epoch >= self.fences[pool]
                for other, name in [lease for lease in self.leases if lease[1] == pool]:
                    assert self.arbiter.fenced(other, name)
                    del self.leases[other, name]
        self.given.add(key)
        self.leases[request.client, pool] = grant.mode, grant.generation
        process.kept[pool] = grant.mode, grant.generation, request.epoch

    # --- what always holds

    @invariant()
    def leases_are_what_was_granted_and_not_given_back(self) -> None:
        held = {
            (lease.client, name): (lease.mode, lease.generation)
            for name, pool in self.arbiter.pools.items()
            for lease in pool.held()
        }
        assert held == self.leases

    @invariant()
    def one_writer_a_pool_and_nothing_dropped_is_held(self) -> None:
        writers = [pool for (_, pool), (mode, _) in self.leases.items() if mode is RW]
        assert len(writers) == len(set(writers))
        assert not {(pool, generation) for (_, pool), (_, generation) in self.leases.items()} & self.dropped

    @invariant()
    def one_process_may_write_a_generation(self) -> None:
        assert all(len(processes) <= 1 for processes in self.writable.values())

    @invariant()
    def requests_wait_for_a_reason(self) -> None:
        known = {request.key for pool in self.arbiter.pools.values() for request in pool.waiting()}
        assert known == set(self.waiting)
        for request in self.waiting.values():
            pool = self.arbiter.pools[request.pool]
            if pool.awaited:
                continue
            written = any(held.mode is RW for held in pool.held())
            if staged(request.pool):
                assert request.mode is RW or not pool.standing, "a reader waits although there is something to read"
                assert request.mode is RO or written, "a writer waits although nobody writes"
            else:
                assert written or list(pool.suspects()), "the next holder waits although the last one is gone"

    @invariant()
    def nothing_is_forgotten_or_kept_for_nobody(self) -> None:
        """Every generation was dropped, or stands, or is read, or somebody who lives may have it mapped."""
        for pool in self.arbiter.pools.values():
            if pool.state is PoolState.EMPTY:
                assert pool.standing == 0
            watched = {connection for p in self.processes for connection in (*p.earlier, p.connection)}
            assert set(pool.suspects()) <= watched


TestArbiterMachine = ArbiterMachine.TestCase
TestArbiterMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
