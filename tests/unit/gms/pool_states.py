"""An arbiter in each state that its pools can have, and its answers in short words."""

from __future__ import annotations

from gms.arbiter import Arbiter
from gms.leases import Action, Drop, Grant, PoolState, Refuse, Request
from gms.protocol import LeaseMode

W, R, N = 1, 2, 3  # the writer or holder, a reader or waiter, the newcomer
WEIGHTS, KV = "weights/k", "kv"
RW, RO, ANY = LeaseMode.RW, LeaseMode.RO, LeaseMode.RW_OR_RO


def ask(client: int, pool: str, mode: LeaseMode = RW, epoch: int = 0, deadline: float = 10.0) -> Request:
    return Request(client * 100 + epoch, client, f"engine {client}", pool, mode, epoch, deadline)


def short(actions: list[Action]) -> list[str]:
    """Actions in words: who got what."""
    words = []
    for action in actions:
        match action:
            case Grant():
                words.append(f"{action.request.client} gets {action.mode} {action.generation}")
            case Refuse():
                words.append(f"{action.request.client} refused {action.code}")
            case Drop():
                words.append(f"drop {action.generation}")
    return words


def leave(arbiter: Arbiter, client: int, proof: bool) -> list[Action]:
    """The client's connection is gone, and with `proof` so are its processes."""
    return [action for pool in list(arbiter.pools) for action in arbiter.release(client, pool, proof)]


def state(arbiter: Arbiter, pool: str) -> PoolState:
    return arbiter.pools[pool].state if pool in arbiter.pools else PoolState.EMPTY


# --- weights


def empty() -> Arbiter:
    return Arbiter()


def writing() -> Arbiter:
    arbiter = Arbiter()
    arbiter.attach(ask(W, WEIGHTS))
    return arbiter


def aborted() -> Arbiter:
    """The writer hung up, and nothing proves yet that it is gone."""
    arbiter = writing()
    leave(arbiter, W, proof=False)
    return arbiter


def read() -> Arbiter:
    """The writer committed, and reads on."""
    arbiter = writing()
    arbiter.commit(W, WEIGHTS)
    return arbiter


def committed() -> Arbiter:
    arbiter = read()
    leave(arbiter, W, proof=True)
    return arbiter


def rewriting() -> Arbiter:
    """Generation 1 is read by R while W stages generation 2."""
    arbiter = committed()
    arbiter.attach(ask(R, WEIGHTS, RO))
    arbiter.attach(ask(W, WEIGHTS))
    return arbiter


def adopting() -> Arbiter:
    """After a restart; 7 was committed."""
    arbiter = Arbiter(after=9)
    arbiter.restore_weights(WEIGHTS, adopting=7, returning=0, corrupt="", condemned={})
    return arbiter


def adopting_awaited() -> Arbiter:
    """The same, and R wants to read or write."""
    arbiter = adopting()
    assert arbiter.attach(ask(R, WEIGHTS, ANY)) == []
    return arbiter


def returning() -> Arbiter:
    """After a restart; the writer of 7 had asked for its commit."""
    arbiter = Arbiter(after=9)
    arbiter.restore_weights(WEIGHTS, adopting=0, returning=7, corrupt="", condemned={})
    return arbiter


def returning_read() -> Arbiter:
    """The same, and R has handed back 5, which was committed before."""
    arbiter = Arbiter(after=9)
    arbiter.restore_weights(WEIGHTS, adopting=5, returning=7, corrupt="", condemned={})
    assert arbiter.adopted(WEIGHTS, R) == []
    arbiter.rejoin(R, WEIGHTS)
    return arbiter


def condemned_restored() -> Arbiter:
    """After a restart; 7 was condemned, and its readers live."""
    arbiter = Arbiter(after=9)
    arbiter.restore_weights(
        WEIGHTS, adopting=0, returning=0, corrupt="a tensor has changed", condemned={7: "a tensor has changed"}
    )
    return arbiter


def condemned() -> Arbiter:
    """What was committed turned out to be wrong, nobody reads it."""
    arbiter = committed()
    assert short(arbiter.condemn(WEIGHTS, "a tensor has changed")) == ["drop 1"]
    return arbiter


def condemned_read() -> Arbiter:
    """The same, and W reads it still."""
    arbiter = read()
    assert arbiter.condemn(WEIGHTS, "a tensor has changed") == []
    return arbiter


# --- kv


def kv_held() -> Arbiter:
    arbiter = Arbiter()
    arbiter.attach(ask(W, KV, epoch=5))
    return arbiter


def kv_kept() -> Arbiter:
    """The holder died: pages stand, nobody holds them."""
    arbiter = kv_held()
    leave(arbiter, W, proof=True)
    return arbiter


def kv_unproved() -> Arbiter:
    arbiter = kv_held()
    leave(arbiter, W, proof=False)
    return arbiter


def kv_awaited() -> Arbiter:
    """W holds epoch 5, R waits with epoch 6."""
    arbiter = kv_held()
    assert arbiter.attach(ask(R, KV, epoch=6)) == []
    return arbiter


def kv_unproved_awaited() -> Arbiter:
    arbiter = kv_awaited()
    assert leave(arbiter, W, proof=False) == []
    return arbiter


def kv_orphaned() -> Arbiter:
    """R took over with fresh pages, W lives on with the old ones."""
    arbiter = kv_awaited()
    assert short(arbiter.expire(10.0)) == ["2 gets rw 2"]
    return arbiter


def kv_adopting() -> Arbiter:
    """After a restart; epoch 5 held generation 7."""
    arbiter = Arbiter(after=9)
    arbiter.restore_kv(KV, adopting=7, fence=5, lease_epoch=5)
    return arbiter


def kv_adopting_awaited() -> Arbiter:
    """The same, and R waits with epoch 6."""
    arbiter = kv_adopting()
    assert arbiter.attach(ask(R, KV, epoch=6)) == []
    return arbiter


def kv_fenced() -> Arbiter:
    """After a restart; nobody lived who could hand back, only the fence is left."""
    arbiter = Arbiter(after=9)
    arbiter.restore_kv(KV, adopting=0, fence=5, lease_epoch=5)
    return arbiter
