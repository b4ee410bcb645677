"""The service as people see it: its status, and sentences about who waits for what. Pure reading; nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gms.allocations import AllocationTable
from gms.arbiter import Arbiter, staged
from gms.clients import Client
from gms.leases import Pool, Request
from gms.protocol import LeaseInfo, LeaseMode, PoolStatus

P = TypeVar("P")


def pools(
    arbiter: Arbiter, table: AllocationTable[P], clients: Mapping[int, Client], *, now: float
) -> list[PoolStatus]:
    """`now` in the time of the requests' deadlines."""
    return [
        PoolStatus(
            name=name,
            state=pool.state,
            generation=pool.current,
            epoch=max(pool.epoch, 0),
            bytes=table.bytes_in(name),
            high_water_bytes=table.high_water_in(name),
            orphaned_bytes=sum(table.bytes_of(name, generation) for generation in pool.orphans()),
            waiting=len(pool.waiting()),
            waits=[wait(pool, request, clients, now=now) for request in pool.waiting()],
            leases=[
                LeaseInfo(who.engine, who.instance, who.pid, held.mode)
                for held in pool.held()
                if (who := clients.get(held.client)) is not None
            ],
            allocations=table.info(name, pool.current),
            corrupt=pool.corrupt,
        )
        for name, pool in arbiter.pools.items()
    ]


def wait(pool: Pool, request: Request, clients: Mapping[int, Client], *, now: float) -> str:
    """Who waits, for what, whose doing it is, and for how long at most."""
    suspects = () if staged(request.pool) else pool.suspects()
    doing = [*suspects, *(held.client for held in pool.held() if held.mode is LeaseMode.RW)]
    whom = ", ".join(dict.fromkeys(clients[client].label for client in doing if client in clients))
    epoch = "" if staged(request.pool) else f", epoch {request.epoch},"
    return (
        f"{request.label}{epoch} waits for {request.pool} as {request.mode}, because {pool.cause()}"
        f"{f' ({whom})' if whom else ''}; {max(request.deadline - now, 0.0):.1f} s left"
    )
