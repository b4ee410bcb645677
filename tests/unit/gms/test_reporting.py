from __future__ import annotations

import pytest

from gms import reporting
from gms.allocations import AllocationTable, Entry
from gms.arbiter import Arbiter
from gms.clients import Client
from gms.leases import Request
from gms.protocol import AllocationInfo, LeaseInfo, LeaseMode

A = Client(1, "engine", "a", "i", 11)
B = Client(2, "engine", "b", "j", None)
CLIENTS = {client.id: client for client in (A, B)}
RW, RO = LeaseMode.RW, LeaseMode.RO


def ask(client: Client, pool: str, mode: LeaseMode = RW, epoch: int = 0, deadline: float = 10.0) -> Request:
    return Request(client.id, client.id, client.label, pool, mode, epoch, deadline)


def filled(table: AllocationTable[str], pool: str, generation: int, size: int) -> None:
    entry = Entry[str](pool, generation, "pages", size, 64, "engine a")
    table.reserve(entry)
    entry.pages = ["page"] * entry.chunks


def test_a_client_is_called_by_what_is_known_of_it() -> None:
    assert (A.label, B.label) == ("engine a (pid 11)", "engine b")


def test_an_empty_service_has_no_pools() -> None:
    assert reporting.pools(Arbiter(), AllocationTable[str](), {}, now=0.0) == []


def test_a_pool_says_who_holds_it_and_who_waits() -> None:
    arbiter, table = Arbiter(), AllocationTable[str]()
    arbiter.attach(ask(A, "kv", epoch=5))
    filled(table, "kv", 1, 100)
    arbiter.attach(ask(B, "kv", epoch=6))
    (pool,) = reporting.pools(arbiter, table, CLIENTS, now=2.5)
    assert (pool.name, pool.state, pool.generation, pool.epoch) == ("kv", "WRITING", 1, 6)
    assert (pool.bytes, pool.orphaned_bytes, pool.waiting) == (100, 0, 1)
    assert pool.leases == [LeaseInfo("a", "i", 11, RW)]
    assert pool.allocations == [AllocationInfo("pages", 100, 64)]
    assert pool.waits == [
        "engine b, epoch 6, waits for kv as rw, because nothing proves yet that its last holder is gone "
        "(engine a (pid 11)); 7.5 s left"
    ]


def test_orphans_count_and_the_current_generation_is_listed() -> None:
    arbiter, table = Arbiter(), AllocationTable[str]()
    arbiter.attach(ask(A, "kv", epoch=5))
    filled(table, "kv", 1, 100)
    arbiter.attach(ask(B, "kv", epoch=6, deadline=1.0))
    arbiter.expire(1.0)
    filled(table, "kv", 2, 30)
    (pool,) = reporting.pools(arbiter, table, CLIENTS, now=2.0)
    assert (pool.generation, pool.bytes, pool.orphaned_bytes) == (2, 130, 100)
    assert pool.allocations == [AllocationInfo("pages", 30, 64)]
    assert pool.leases == [LeaseInfo("b", "j", None, RW)]


def test_a_wait_for_weights_names_the_writer_and_never_a_past_one() -> None:
    arbiter = Arbiter()
    arbiter.attach(ask(A, "weights/x"))
    arbiter.release(A.id, "weights/x", proof=False)
    request = ask(B, "weights/x", RO)
    arbiter.attach(request)
    sentence = reporting.wait(arbiter.pools["weights/x"], request, CLIENTS, now=11.0)
    assert sentence == ("engine b waits for weights/x as ro, because nobody has committed anything to it; 0.0 s left")
    arbiter.attach(ask(A, "weights/x"))
    sentence = reporting.wait(arbiter.pools["weights/x"], request, CLIENTS, now=0.0)
    assert "another client is still writing it (engine a (pid 11)); 10.0 s left" in sentence


def test_a_holder_that_is_no_client_any_more_is_left_out() -> None:
    arbiter = Arbiter()
    arbiter.attach(ask(A, "kv", epoch=5))
    (pool,) = reporting.pools(arbiter, AllocationTable[str](), {}, now=0.0)
    assert pool.leases == []


@pytest.mark.parametrize("read", [False, True])
def test_corruption_is_told_with_its_reason(read: bool) -> None:
    arbiter = Arbiter()
    arbiter.attach(ask(A, "weights/x"))
    arbiter.commit(A.id, "weights/x")
    if not read:
        arbiter.release(A.id, "weights/x", proof=True)
    arbiter.condemn("weights/x", "tensor 'w' has changed")
    (pool,) = reporting.pools(arbiter, AllocationTable[str](), CLIENTS, now=0.0)
    assert (pool.state, pool.generation, pool.corrupt) == ("EMPTY", 0, "tensor 'w' has changed")
    assert len(pool.leases) == read


def test_a_pool_that_is_being_handed_back_says_so() -> None:
    arbiter = Arbiter(after=9)
    arbiter.restore_kv("kv", adopting=7, fence=5, lease_epoch=5)
    request = ask(B, "kv", epoch=6)
    arbiter.attach(request)
    (pool,) = reporting.pools(arbiter, AllocationTable[str](), CLIENTS, now=0.0)
    assert (pool.state, pool.generation) == ("ADOPTING", 7)
    assert "still being handed back" in pool.waits[0]


def test_a_pool_that_nobody_asked_of_has_no_negative_epoch() -> None:
    arbiter = Arbiter()
    arbiter.attach(ask(A, "kv", RO))
    (pool,) = reporting.pools(arbiter, AllocationTable[str](), CLIENTS, now=0.0)
    assert (pool.state, pool.epoch) == ("EMPTY", 0)
