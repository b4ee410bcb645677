"""What the running service writes down for the next one: the state of each pool when it changes, and who holds what.

A journal that cannot be written stops nothing. It is told, and what is lost is that pages could be taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gms.allocations import AllocationTable
from gms.arbiter import Arbiter, staged
from gms.backends.base import NO_DESCRIPTORS
from gms.events import EventLog
from gms.journal import AllocationRecord, Journal, PoolRecord
from gms.leases import Pool

P = TypeVar("P")


class Ledger(Generic[P]):
    """Without a journal nothing is written and leases have no descriptor."""

    def __init__(
        self,
        journal: Journal | None,
        *,
        arbiter: Arbiter,
        table: AllocationTable[P],
        events: EventLog,
        device_id: str,
        algorithm: str,
    ) -> None:
        self._journal = journal
        self._arbiter = arbiter
        self._table = table
        self._events = events
        self._device_id = device_id
        self._algorithm = algorithm
        self._processes: dict[str, int] = {}
        self._leases: dict[tuple[int, str], Path] = {}
        self._unwritten: dict[str, str] = {}  # pool -> why its record is not as it should be
        self._unlocked: dict[tuple[int, str], str] = {}  # (client, pool) -> why that lease has no descriptor

    @property
    def problem(self) -> str:
        """Why pages could not be taken back as things stand; empty if they could."""
        if self._journal is None:
            return "this service keeps no journal"
        return next(iter([*self._unwritten.values(), *self._unlocked.values()]), "")

    def record(self, name: str) -> None:
        """Writes a pool down as it is now, if that is new, and what could not be written before."""
        if self._journal is None:
            return
        before = self.problem
        if self._written(self._journal, name):
            all(self._written(self._journal, other) for other in list(self._unwritten))
        self._tell(before)

    def check(self) -> None:
        """To be called now and then: writes what could not be written, and everything if the folder was removed."""
        journal = self._journal
        if journal is None:
            return
        before = self.problem
        for key, path in self._leases.items():
            if not path.exists():
                self._unlocked[key] = "lease files were removed, and with them the locks of leases that stand"
        if journal.intact:
            self._unwritten |= dict.fromkeys(journal.missing(), "its record was removed")
        else:
            try:
                journal.make_anew()
            except OSError as error:
                self._unwritten |= dict.fromkeys(self._arbiter.pools, str(error))
                self._tell(before)
                return
            self._unwritten |= dict.fromkeys(self._arbiter.pools, "the state folder was removed")
        for name in list(self._unwritten):
            self._written(journal, name)
        self._tell(before)

    def unlocked(self) -> list[tuple[int, str]]:
        """Client and pool of each lease that has no file, once there can be one: a client that comes back on another
        connection gets it."""
        if not self._unlocked or self._unwritten or self._journal is None or not self._journal.takes_files():
            return []
        return list(self._unlocked)

    def begin_commit(self, name: str, generation: int, manifest: bytes) -> None:
        """A writer asked for a commit: if the service ends before it is done, the writer can hand its pages back and
        ask again."""
        self._write_commit(name, lambda journal: journal.save(self._about(name, generation, manifest, committing=True)))

    def end_commit(self, name: str) -> None:
        """It is done, or was refused."""
        self._write_commit(name, lambda journal: journal.forget(name, committing=True))

    def open_lease(self, client: int, pool: str, generation: int, *, processes: int) -> list[int]:
        """The locked descriptor for a new lease; the caller sends and closes it. Empty if there can be none. Raises
        OSError if descriptors are short."""
        if self._journal is None:
            return []
        before = self.problem
        try:
            descriptor, path = self._journal.open_lease(pool, generation)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise  # a moment's shortage is not worth a lease without a lock
            self._unlocked[client, pool] = str(error)
            self._tell(before)
            return []
        if self._processes.get(pool) != processes and not staged(pool):
            self._processes[pool] = processes
            self.record(pool)
        self.close_lease(client, pool)
        self._leases[client, pool] = path
        return [descriptor]

    def close_lease(self, client: int, pool: str) -> None:
        """The client has nothing any more that it could hand back. Harmless if it never had."""
        self._unlocked.pop((client, pool), None)
        path = self._leases.pop((client, pool), None)
        if path is not None and self._journal is not None:
            self._journal.close_lease(path)

    def close_leases(self, client: int) -> None:
        """The client is gone for good."""
        for key in [key for key in (*self._leases, *self._unlocked) if key[0] == client]:
            self.close_lease(*key)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _written(self, journal: Journal, name: str) -> bool:
        pool = self._arbiter.pools.get(name)
        try:
            if pool is None or (staged(name) and not pool.recorded):
                journal.forget(name)
            else:
                journal.save(self._describe(name, pool))
        except OSError as error:
            self._unwritten[name] = str(error)
            return False
        self._unwritten.pop(name, None)
        return True

    def _tell(self, before: str) -> None:
        if self.problem and not before:
            detail = f"The journal cannot be written ({self.problem}): pages could not be taken back after a restart."
            self._events.emit("journal", detail, level=logging.ERROR)
        elif before and not self.problem:
            self._events.emit("journal", "The journal can be written again.")

    def _write_commit(self, name: str, write: Callable[[Journal], None]) -> None:
        if self._journal is None:
            return
        before = self.problem
        try:
            write(self._journal)
        except OSError as error:
            self._unwritten[name] = str(error)
        self._tell(before)

    def _describe(self, name: str, pool: Pool) -> PoolRecord:
        return msgspec.structs.replace(
            self._about(name, pool.recorded, self._table.manifest(name, pool.recorded)),
            fence=pool.epoch,
            lease_epoch=pool.lease_epoch,
            processes=self._processes.get(name, 0),
            corrupt=pool.corrupt,
            condemned=dict(pool.condemned),
        )

    def _about(self, name: str, generation: int, manifest: bytes, *, committing: bool = False) -> PoolRecord:
        return PoolRecord(
            device_id=self._device_id,
            pool=name,
            generation=generation,
            highest_generation=self._arbiter.last_generation,
            fence=0,
            lease_epoch=0,
            manifest=manifest,
            committing=committing,
            algorithm=self._algorithm,
            allocations=[
                AllocationRecord(
                    tag=entry.tag,
                    size_bytes=entry.size_bytes,
                    chunk_bytes=entry.chunk_bytes,
                    owner=entry.owner,
                    identities=list(entry.identities),
                    digests=entry.digests,
                )
                for entry in self._table.entries(name, generation)
                if len(entry.identities) == entry.chunks  # else it is still being filled
            ],
        )
