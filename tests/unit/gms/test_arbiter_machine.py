"""Random histories against what must always hold, whatever the rules say in detail."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gms.arbiter import Arbiter
from gms.leases import Action, Drop, Grant, Refuse, Request
from gms.protocol import LeaseMode

CLIENTS = st.integers(1, 5)
POOLS = st.sampled_from(["weights/a", "weights/b", "kv", "kv_index"])


class ArbiterMachine(RuleBasedStateMachine):
    """Keeps, apart from the arbiter, who may still have which generation mapped for writing."""

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter()
        self.now = 0.0
        self.key = 0
        self.waiting: dict[int, Request] = {}
        self.writable: dict[tuple[str, int], set[int]] = {}
        self.dropped: set[tuple[str, int]] = set()
        self.dead: set[int] = set()
        self.gone: set[int] = set()

    @rule(client=CLIENTS, pool=POOLS, mode=st.sampled_from(LeaseMode), epoch=st.integers(0, 6), wait=st.integers(0, 5))
    def attach(self, client: int, pool: str, mode: LeaseMode, epoch: int, wait: int) -> None:
        if client in self.gone or any(r.client == client for r in self.waiting.values()):
            return  # a connection has one request under way
        self.key += 1
        request = Request(self.key, client, f"engine {client}", pool, mode, epoch, self.now + wait)
        self.waiting[request.key] = request
        self.apply(self.arbiter.attach(request))

    @rule(client=CLIENTS, pool=POOLS, quiesced=st.booleans())
    def release(self, client: int, pool: str, quiesced: bool) -> None:
        if client in self.gone or any(r.client == client for r in self.waiting.values()):
            return
        if quiesced:
            self.unmap(client, pool)
        self.apply(self.arbiter.release(client, pool, quiesced))
        assert self.arbiter.lease(client, pool) is None

    @rule(client=CLIENTS)
    def hang_up(self, client: int) -> None:
        self.gone.add(client)
        self.waiting = {key: r for key, r in self.waiting.items() if r.client != client}
        self.leave(client, proof=False)

    @rule(client=CLIENTS)
    def die(self, client: int) -> None:
        self.gone.add(client)
        self.dead.add(client)
        self.waiting = {key: r for key, r in self.waiting.items() if r.client != client}
        self.unmap(client, None)
        self.leave(client, proof=True)
        assert not self.arbiter.suspected(client)

    @precondition(lambda self: self.gone)
    @rule()
    def replace_the_dead(self) -> None:
        """Numbers are not used again; in this model a dead one, owing nothing, may stand for a new client."""
        fresh = {c for c in self.dead if not self.arbiter.suspected(c)}
        self.gone -= fresh
        self.dead -= fresh

    @rule(client=CLIENTS, pool=st.sampled_from(["weights/a", "weights/b"]))
    def commit(self, client: int, pool: str) -> None:
        lease = self.arbiter.lease(client, pool)
        if lease is not None and lease.mode is LeaseMode.RW:
            self.writable[pool, lease.generation].discard(client)  # the backend checked that it unmapped
            self.apply(self.arbiter.commit(client, pool))
            after = self.arbiter.lease(client, pool)
            assert after is not None
            assert after.mode is LeaseMode.RO

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.apply(self.arbiter.expire(self.now))
        assert all(request.deadline > self.now for request in self.waiting.values())

    def leave(self, client: int, proof: bool) -> None:
        for pool in list(self.arbiter.pools):
            self.apply(self.arbiter.release(client, pool, proof))

    def unmap(self, client: int, pool: str | None) -> None:
        for (name, _), mapped in self.writable.items():
            if pool in (None, name):
                mapped.discard(client)

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant(request=request, mode=mode, generation=generation):
                    assert self.waiting.pop(request.key) is request
                    key = (request.pool, generation)
                    assert key not in self.dropped
                    others = self.writable.setdefault(key, set()) - {request.client}
                    assert not others, f"{key} may still be written by {others}"
                    if mode is LeaseMode.RW:
                        self.writable[key].add(request.client)
                case Refuse(request=request):
                    assert self.waiting.pop(request.key) is request
                case Drop(pool=pool, generation=generation):
                    assert (pool, generation) not in self.dropped
                    assert not self.writable.get((pool, generation))
                    self.dropped.add((pool, generation))

    @invariant()
    def one_writer_a_pool_and_no_lease_on_what_was_dropped(self) -> None:
        for name, pool in self.arbiter.pools.items():
            held = list(pool.held())
            assert sum(lease.mode is LeaseMode.RW for lease in held) <= 1
            assert len({lease.client for lease in held}) == len(held)
            assert all((name, lease.generation) not in self.dropped for lease in held)
            assert not {lease.client for lease in held} & self.gone

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        known = {request.key for pool in self.arbiter.pools.values() for request in pool.waiting()}
        assert known == set(self.waiting)


TestArbiterMachine = ArbiterMachine.TestCase
TestArbiterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
