"""Who may read or write which pool (docs/adr/0003). Pure: asked with a Request, it answers with actions.

The rules of each kind of pool stand in `staged_pool` and `epoch_pool`; here is what holds for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gms.epoch_pool import EpochPool
from gms.leases import Action, Generations, Held, Pool, PoolState, Refuse, Request
from gms.protocol import ErrorCode, LeaseMode
from gms.staged_pool import StagedPool

MAX_POOLS: Final = 64


class Arbiter:
    """All pools of one service. `after` is the highest generation that was ever given out before."""

    def __init__(self, *, after: int = 0) -> None:
        self._pools: dict[str, Pool] = {}
        self._generations = Generations(after)

    @property
    def pools(self) -> dict[str, Pool]:
        return self._pools

    @property
    def last_generation(self) -> int:
        """The highest that was ever given out."""
        return self._generations.last

    def restore_weights(
        self, pool: str, *, adopting: int, returning: int, corrupt: str, condemned: Mapping[int, str]
    ) -> None:
        """What a journal says of weights; see `StagedPool`."""
        self._pools[pool] = StagedPool(
            pool, self._generations, adopting=adopting, returning=returning, corrupt=corrupt, condemned=condemned
        )

    def restore_kv(self, pool: str, *, adopting: int, fence: int, lease_epoch: int) -> None:
        """What a journal says of a pool with one holder; see `EpochPool`."""
        self._pools[pool] = EpochPool(pool, self._generations, adopting=adopting, fence=fence, lease_epoch=lease_epoch)

    def attach(self, request: Request) -> list[Action]:
        pool = self._pools.get(request.pool)
        evicted: list[Action] = []
        if pool is None:
            if len(self._pools) >= MAX_POOLS and request.mode is not LeaseMode.RO:  # that one could only wait
                evicted = self.evict()
            if len(self._pools) >= MAX_POOLS:
                message = (
                    f"{MAX_POOLS} pools are in use, {request.pool} is one too many; end an engine of another model."
                )
                return [*evicted, Refuse(request, ErrorCode.TOO_MANY, message, retryable=True)]
            kind = StagedPool if staged(request.pool) else EpochPool
            pool = self._pools[request.pool] = kind(request.pool, self._generations)
        return evicted + self._tidy(request.pool, pool.request(request))

    def release(self, client: int, pool: str, proof: bool) -> list[Action]:
        """The client has no lease on the pool any more, nor a place in its queue; with `proof`, no mapping either. May
        be told again, with proof, and of clients that hold nothing."""
        return self._tidy(pool, self._pools[pool].leave(client, proof)) if pool in self._pools else []

    def commit(self, client: int, pool: str) -> list[Action]:
        return self._pools[pool].commit(client)

    def inherit(self, pool: str, others: frozenset[int], client: int) -> None:
        """See `gms.leases.Pool.inherit`."""
        if pool in self._pools:
            self._pools[pool].inherit(others, client)

    def adopted(self, pool: str, client: int) -> list[Action]:
        """Every page is there; where a pool has one holder, it is `client`. Raises ValueError unless the pool is
        ADOPTING, or the client `may_return` to it."""
        return self._pools[pool].adopted(client)

    def rejoin(self, client: int, pool: str) -> None:
        """The client goes on reading what it has mapped. Raises ValueError where nothing is committed."""
        found = self._pools[pool]
        if not isinstance(found, StagedPool):
            raise ValueError(f"{pool} has no readers")
        found.rejoin(client)

    def write_on(self, client: int, pool: str) -> None:
        """The writer of a generation that was being committed has handed it back. Raises ValueError if none was."""
        found = self._pools[pool]
        if not isinstance(found, StagedPool):
            raise ValueError(f"{pool} has no writers that come back")
        found.write_on(client)

    def settle(self, pool: str, generation: int) -> list[Action]:
        """The pages of an awaited generation will not come back."""
        return self._tidy(pool, self._pools[pool].settle(generation)) if pool in self._pools else []

    def condemn(self, pool: str, reason: str) -> list[Action]:
        """What is committed there is not what was written."""
        found = self._pools.get(pool)
        return found.condemn(reason) if isinstance(found, StagedPool) else []

    def evict(self) -> list[Action]:
        """Gives up the oldest weights that nobody uses, if there are any."""
        for name, pool in self._pools.items():
            if isinstance(pool, StagedPool) and (actions := pool.evict()):
                return self._tidy(name, actions)
        return []

    def unused(self) -> list[tuple[str, int]]:
        """Pool and generation of all that `evict` would give up, one call after the other."""
        staged_pools = [(name, pool) for name, pool in self._pools.items() if isinstance(pool, StagedPool)]
        return [(name, pool.current) for name, pool in staged_pools if pool.unused]

    def lasting(self) -> set[tuple[str, int]]:
        """Pool and generation of all that does not go by itself: what clients have a lease on, and KV pages that are
        kept for the next holder. Not so what waits for proof or to be handed back."""
        held = {(name, lease.generation) for name, pool in self._pools.items() for lease in pool.held()}
        kept = {
            (name, pool.current)
            for name, pool in self._pools.items()
            if isinstance(pool, EpochPool) and pool.state is PoolState.COMMITTED
        }
        return held | kept

    def expire(self, now: float) -> list[Action]:
        return [a for name, pool in list(self._pools.items()) for a in self._tidy(name, pool.expire(now))]

    def next_deadline(self) -> float | None:
        return min((request.deadline for pool in self._pools.values() for request in pool.waiting()), default=None)

    def awaited(self) -> list[tuple[str, int]]:
        """The generations that are to be handed back after a restart."""
        return [(name, generation) for name, pool in self._pools.items() for generation in pool.awaited]

    def standing(self, pool: str) -> int:
        """See `gms.leases.Pool.standing`; 0 for a pool that there is not."""
        return self._pools[pool].standing if pool in self._pools else 0

    def lease(self, client: int, pool: str) -> Held | None:
        held = self._pools[pool].held() if pool in self._pools else ()
        return next((lease for lease in held if lease.client == client), None)

    def fenced(self, client: int, pool: str) -> bool:
        return pool in self._pools and self._pools[pool].fenced(client)

    def suspected(self, client: int, pool: str | None = None) -> bool:
        """Whether something, or something in this pool, waits for the proof that this client is gone."""
        pools = self._pools.values() if pool is None else filter(None, [self._pools.get(pool)])
        return any(client in found.suspects() for found in pools)

    def _tidy(self, name: str, actions: list[Action]) -> list[Action]:
        """Forgets a weights pool that holds nothing: names are made of hashes and would pile up."""
        pool = self._pools[name]
        if isinstance(pool, StagedPool) and pool.idle:
            del self._pools[name]
        return actions


def staged(pool: str) -> bool:
    """Whether a pool of this name is written once and read by many; the others are held by one epoch after another."""
    return pool.startswith("weights/")
