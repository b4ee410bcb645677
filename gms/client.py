"""The engine's side of the memory service: blocking calls over one connection, made from worker threads.

The connection is the lease: when it closes, or when the process dies, the service takes back what this client held.
What the service's own end takes away, `gms.custody` brings back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from gms import fdpass, integrity, protocol
from gms.backends.base import Hash
from gms.connection import REPLY_GRACE_SECONDS, Connection
from gms.mapping import Chunk, Reservation, device_memory
from gms.pages import Allocation, hand_back_messages, receive_allocation
from gms.protocol import (
    AllocationInfo,
    Digests,
    ErrorCode,
    Event,
    EventsReply,
    GmsError,
    LeaseInfo,
    LeaseMode,
    ManifestReply,
    PoolStatus,
    Status,
)

__all__ = [
    "Allocation",
    "AllocationInfo",
    "Chunk",
    "Event",
    "EventsReply",
    "GmsClient",
    "GmsError",
    "Lease",
    "LeaseInfo",
    "LeaseMode",
    "ManifestReply",
    "PoolStatus",
    "Status",
    "digests_of",
]

SLOWEST_BYTES_PER_SECOND: Final = 64 * 1024 * 1024
"""The slowest machine that is waited for while the service fills or checks pages before it answers."""


class Lease:
    """The right to read (RO) or write (RW) one pool. Made by `GmsClient.attach` and `GmsClient.adopt`.

    It owns the descriptor that tells a restarted service that pages may still be handed back (see `protocol.Granted`);
    that one stays open when the service dies, and is closed with the lease or with the client.
    """

    def __init__(
        self,
        connection: Connection,
        pool: str,
        epoch: int,
        granted: protocol.Granted,
        fds: list[int],
        *,
        on_release: Callable[[Lease], None],
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self.mode = granted.mode
        self.generation = granted.generation
        self.fresh = granted.fresh
        self.manifest = granted.manifest
        self.allocations = tuple(granted.allocations)
        self._connection = connection
        self._lock_fds = fds
        self._on_release = on_release

    def allocate(self, tag: str, size_bytes: int, *, timeout_seconds: float = 0.0) -> Allocation:
        """Pages under `tag`; in the kv pools the existing ones of the same tag and size, with their content. Where
        there is no room, it is waited for up to `timeout_seconds`.

        Raises GmsError: out_of_memory (names who holds what), size_mismatch, not_permitted on a read lease, fenced if
        a newer epoch took over, too_many.
        """
        request = protocol.Allocate(pool=self.pool, tag=tag, size_bytes=size_bytes, timeout_seconds=timeout_seconds)
        wait = timeout_seconds + _work_seconds(size_bytes)
        allocation = receive_allocation(self._connection, request, wait_seconds=wait)
        if allocation.created:
            info = AllocationInfo(allocation.tag, allocation.size_bytes, allocation.chunk_bytes)
            self.allocations = (*(known for known in self.allocations if known.tag != tag), info)
        return allocation

    def export(self, tag: str) -> Allocation:
        """The pages under `tag`: read-only on a read lease, writable for a writer. Raises GmsError(not_found)."""
        return receive_allocation(self._connection, protocol.Export(pool=self.pool, tag=tag))

    def put_manifest(self, manifest: bytes) -> None:
        """In the kv pools: what the next holder is to know of the pages. Raises GmsError(fenced)."""
        request = protocol.PutManifest(pool=self.pool, manifest=manifest)
        self._connection.call(request, protocol.Done)
        self.manifest = manifest

    def commit(self, manifest: bytes, *, digests: Digests | None = None) -> None:
        """Publishes what was written, with `manifest`, to readers; this lease is then a read lease.

        All writable mappings must be gone: GmsError(still_mapped) says so, keeps the lease and can be tried again.
        `digests` (see `digests_of`) are for devices whose memory the service cannot read.
        """
        request = protocol.Commit(pool=self.pool, manifest=manifest, digests=digests or {})
        fds: list[int] = []
        granted = self._connection.call(
            request, protocol.Granted, wait_seconds=_work_seconds(self.size_bytes), received=fds
        )
        self.mode, self.fresh = granted.mode, granted.fresh
        self.generation, self.manifest = granted.generation, manifest
        if fds:
            self.close_lock()
            self._lock_fds = fds

    def verify(self, *, digests: Digests | None = None) -> int:
        """Compares what is committed with what was; returns how many bytes were compared. `digests` as in `commit`.

        Raises GmsError(corrupt): names the tensor that has changed.
        """
        request = protocol.Verify(pool=self.pool, digests=digests or {})
        wait = _work_seconds(self.size_bytes)
        return self._connection.call(request, protocol.Verified, wait_seconds=wait).size_bytes

    def release(self, *, quiesced: bool = False) -> None:
        """Gives the lease back. With `quiesced` the caller vouches that no process of it has the pages mapped any more,
        and the next holder need not wait for this process to die."""
        self._connection.call(protocol.Release(pool=self.pool, quiesced=quiesced), protocol.Done)
        self._on_release(self)

    def close_lock(self) -> None:
        """For whoever ends the connection: a restarted service need not wait for this lease's pages any more."""
        fdpass.close_all(self._lock_fds)

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.allocations)


class GmsClient:
    """One connection to a memory service. See `connect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._leases: list[Lease] = []
        self._closed = False
        self._guard = threading.Lock()

    @classmethod
    def connect(
        cls,
        socket_path: str | os.PathLike[str],
        *,
        engine: str,
        instance: str,
        device: str = "cpu:0",
        device_id: str | None = None,
        client: str = "engine",
        pidfds: Sequence[int] = (),
        timeout_seconds: float = 10.0,
        retry_seconds: float | None = None,
    ) -> GmsClient:
        """Connects and says hello with this process's own pidfd, by which the service learns of its death, and with
        `pidfds` of the processes that map for it, which stay the caller's.

        `device_id` is by default what `device` is in this process. A socket that is missing or refuses is tried again
        for `retry_seconds`, by default as long as the call may take: the service may be restarting. Raises GmsError:
        service_gone (retryable), version_mismatch, wrong_device, too_many.
        """
        self = cls(
            Connection.dial(
                os.fspath(socket_path),
                retry_seconds=timeout_seconds if retry_seconds is None else retry_seconds,
                timeout_seconds=timeout_seconds,
            )
        )
        try:
            own = os.pidfd_open(os.getpid())
            try:
                hello = protocol.Hello(
                    version=protocol.VERSION,
                    client=client,
                    engine=engine,
                    instance=instance,
                    device=device,
                    device_id=device_id or _device_id(device),
                    fds=1 + len(pidfds),
                )
                self._connection.call(
                    hello, protocol.Welcome, wait_seconds=timeout_seconds, grace_seconds=0.0, fds=[own, *pidfds]
                )
            finally:
                os.close(own)
        except BaseException:
            self.close()
            raise
        return self

    def attach(
        self, pool: str, mode: LeaseMode, *, epoch: int = 0, timeout_seconds: float = 60.0, verify: bool = False
    ) -> Lease:
        """Waits up to `timeout_seconds` for a lease on `pool`.

        `weights/<layout key>`: RW for one writer, RO once something is committed, RW_OR_RO for whichever comes first.
        `kv`, `kv_index`: RW only, by `epoch`; if the old holder's end is not proved in time, the lease comes with
        fresh pages (`lease.fresh`). With `verify` what is to be read is checksummed first. Raises GmsError: timeout
        (retryable), stale_epoch, already_attached, corrupt.
        """
        known = sum(info.size_bytes for info in self.get_manifest(pool).allocations) if verify else 0
        request = protocol.Attach(pool=pool, mode=mode, epoch=epoch, timeout_seconds=timeout_seconds, verify=known > 0)
        lease = self._lease(request, timeout_seconds + _work_seconds(known))
        if verify and not known and lease.mode is LeaseMode.RO:
            # How long it takes is known only now that something is committed.
            try:
                lease.verify()
            except BaseException:
                with suppress(GmsError):  # it ends with the connection, if not so
                    lease.release()
                raise
        return lease

    def adopt(
        self, pool: str, *, generation: int, mode: LeaseMode, epoch: int, allocations: Sequence[Allocation]
    ) -> Lease:
        """Hands the pages of a lease back to a restarted service, all chunks of all allocations; the descriptors stay
        the caller's. The lease is then as it was.

        Raises GmsError: fenced or stale_epoch (a newer epoch has the pool), not_found, mismatch, corrupt: these pages
        are not, or no longer, the service's.
        """
        messages = hand_back_messages(allocations)
        for number, (parts, fds) in enumerate(messages, 1):
            last = number == len(messages)
            request = protocol.Adopt(
                pool=pool,
                generation=generation,
                mode=mode,
                epoch=epoch,
                parts=parts,
                more=not last,
                fds=len(fds),
            )
            if last:
                wait = _work_seconds(sum(allocation.size_bytes for allocation in allocations))
                return self._lease(request, wait, fds)
            self._connection.call(request, protocol.Done, fds=fds)
        raise ValueError("there is nothing to hand back")

    def get_manifest(self, pool: str, *, digests: bool = False) -> ManifestReply:
        """What is committed in a weights pool, or was put into a kv pool, and its allocations; with `digests` also what
        their content is compared with. Needs no lease."""
        return self._connection.call(protocol.GetManifest(pool=pool, digests=digests), protocol.ManifestReply)

    def status(self, *, timeout_seconds: float = REPLY_GRACE_SECONDS) -> Status:
        """Pools, leases and bytes as they are now. Raises GmsError: no answer within `timeout_seconds`."""
        request = protocol.GetStatus()
        return self._connection.call(request, protocol.StatusReply, grace_seconds=timeout_seconds).status

    def events(self, after: int = 0, *, timeout_seconds: float = 0.0) -> EventsReply:
        """What happened after event number `after`; waits up to `timeout_seconds` for the first of it.

        Numbers begin at 1 in each service's life: begin with 0 on every new connection. With a number of an earlier
        life this waits for events that may never come.
        """
        request = protocol.GetEvents(after=after, timeout_seconds=timeout_seconds)
        return self._connection.call(request, protocol.EventsReply, wait_seconds=timeout_seconds)

    @property
    def path(self) -> str:
        """The service's socket."""
        return self._connection.path

    def fileno(self) -> int:
        """The connection, to watch for its end: the service is gone then. Read nothing from it. -1 once closed."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the connection, and with it every lease; a call that waits in another thread ends with `closed`."""
        with self._guard:
            self._closed = True
        self._connection.close()
        while self._leases:
            self._leases.pop().close_lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _lease(self, request: protocol.Attach | protocol.Adopt, wait: float, fds: Sequence[int] = ()) -> Lease:
        received: list[int] = []
        granted = self._connection.call(request, protocol.Granted, wait_seconds=wait, fds=fds, received=received)
        lease = Lease(self._connection, request.pool, request.epoch, granted, received, on_release=self._forget)
        with self._guard:
            if not self._closed:
                self._leases.append(lease)
                return lease
        lease.close_lock()
        raise GmsError(ErrorCode.CLOSED, f"This connection was closed by its owner while {request.pool} was granted.")

    def _forget(self, lease: Lease) -> None:
        with self._guard:
            if not self._closed:
                self._leases.remove(lease)
                lease.close_lock()


def digests_of(place: Reservation, info: AllocationInfo, manifest: bytes, algorithm: Hash) -> list[bytes]:
    """The digests of an allocation that is mapped at `place`, for `commit` and `verify` on devices whose memory the
    service cannot read: the writer computes them before it unmaps. Reads all of it."""
    cut = integrity.pieces(info.size_bytes, info.chunk_bytes, manifest, info.tag)
    return [place.digest(piece.at, piece.length, algorithm) for piece in cut]


def _work_seconds(size_bytes: int) -> float:
    return size_bytes / SLOWEST_BYTES_PER_SECOND


def _device_id(device: str) -> str:
    return device if device.startswith("cpu:") else device_memory(device).device_id
