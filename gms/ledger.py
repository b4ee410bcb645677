"""What the running service writes down for the next one: the state of each pool when it changes, and who holds what.

A journal that cannot be written stops nothing. It is told, and what is lost is that pages could be taken back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

from gms.allocations import AllocationTable
from gms.arbiter import Arbiter, staged
from gms.events import EventLog
from gms.journal import AllocationRecord, Journal, PoolRecord
from gms.leases import Pool

P = TypeVar("P")


class Ledger(Generic[P]):
    """`problem` is why pages could not be taken back as things stand; empty if they could. Without a journal nothing is
    written and leases have no descriptor."""

    def __init__(
        self,
        journal: Journal | None,
        *,
        arbiter: Arbiter,
        table: AllocationTable[P],
        events: EventLog,
        device_id: str,
    ) -> None:
        self.problem = "" if journal is not None else "this service keeps no journal"
        self._journal = journal
        self._arbiter = arbiter
        self._table = table
        self._events = events
        self._device_id = device_id
        self._leases: dict[tuple[int, str], Path] = {}

    def record(self, name: str) -> None:
        """Writes a pool down as it is now, if that is new."""
        if self._journal is None:
            return
        pool = self._arbiter.pools.get(name)
        try:
            if pool is None or (staged(name) and not pool.standing):
                self._journal.forget(name)
            else:
                self._journal.save(self._describe(name, pool))
        except OSError as error:
            self._failed(error)
        else:
            self.problem = ""

    def open_lease(self, client: int, pool: str, generation: int) -> list[int]:
        """The locked descriptor for a new lease; the caller sends and closes it. Empty if there can be none."""
        if self._journal is None:
            return []
        try:
            descriptor, path = self._journal.open_lease(pool, generation)
        except OSError as error:
            self._failed(error)
            return []
        self.close_lease(client, pool)
        self._leases[client, pool] = path
        return [descriptor]

    def close_lease(self, client: int, pool: str) -> None:
        """The client has nothing any more that it could hand back. Harmless if it never had."""
        path = self._leases.pop((client, pool), None)
        if path is not None and self._journal is not None:
            self._journal.close_lease(path)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _failed(self, error: OSError) -> None:
        if not self.problem:
            detail = f"The journal cannot be written ({error}): pages could not be taken back after a restart."
            self._events.emit("journal", detail, level=logging.ERROR)
        self.problem = str(error)

    def _describe(self, name: str, pool: Pool) -> PoolRecord:
        return PoolRecord(
            device_id=self._device_id,
            pool=name,
            generation=pool.standing,
            highest_generation=max((p.current for p in self._arbiter.pools.values()), default=0),
            fence=pool.epoch,
            lease_epoch=pool.lease_epoch,
            manifest=self._table.manifest(name, pool.standing),
            allocations=[
                AllocationRecord(
                    tag=entry.tag,
                    size_bytes=entry.size_bytes,
                    chunk_bytes=entry.chunk_bytes,
                    owner=entry.owner,
                    identities=list(entry.identities),
                    digests=entry.digests,
                )
                for entry in self._table.entries(name, pool.standing)
                if len(entry.identities) == len(entry.pages)  # else it is still being filled
            ],
        )
