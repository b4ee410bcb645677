"""One engine's memory in its pod: leases on the service's pools, and the ranges its pages are mapped at.

Both engines go through this: the sim engine directly, vLLM's worker from its own thread. It owns what must be paired:
a lease with its mapping, an fd with its close, an address range with the engine's whole life. Calls block (they talk to
the service over a socket) and belong in a thread when made from an event loop.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.mapping import Reservation

logger = logging.getLogger(__name__)

KV_POOL = "kv"
KV_TAG = "kv"


class MemoryService(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the pod's memory service, and as whom. Travels to vLLM's worker as plain JSON."""

    socket: str
    device: str
    engine: str
    instance: str
    timeout_seconds: float
    """How long to wait for another engine's commit."""
    connect_seconds: float = 10.0
    """How long to wait for the service to answer: it may be starting, or starting again."""
    proof_seconds: float = 2.0
    """How long a promotion waits for the proof that the KV pages' last holder is dead."""

    @property
    def path(self) -> Path:
        return Path(self.socket)

    def connect(self) -> GmsClient:
        """A connection of its own: leases end with it.

        Raises:
            gms.client.GmsError: nobody answers within ``connect_seconds``.
        """
        return GmsClient.connect(
            self.path,
            engine=self.engine,
            instance=self.instance,
            device=self.device,
            timeout_seconds=self.connect_seconds,
        )

    def kv_fence(self) -> int:
        """The highest epoch that the KV pool has seen, 0 before the first: an engine must come with a higher one.

        Raises:
            gms.client.GmsError: nobody answers within ``connect_seconds``.
        """
        with self.connect() as client:
            status = client.status(timeout_seconds=self.connect_seconds)
        return max((pool.epoch for pool in status.pools if pool.name == KV_POOL), default=0)


class KvMemory:
    """The KV cache: an address range for life, pages of the service behind it only while active.

    The range is reserved once, so that tensors (and on a GPU captured graphs) keep their addresses over every park and
    wake. Pages stay allocated in the service across engines: waking maps them, and allocates only the first time.
    """

    def __init__(self, service: MemoryService, *, size_bytes: int) -> None:
        self._service = service
        self._client: GmsClient | None = None
        self._lease: Lease | None = None
        self.range = Reservation(size_bytes)

    @property
    def mapped(self) -> bool:
        """Whether the service's pages are behind the range."""
        return self._lease is not None

    def map(self, *, epoch: int) -> None:
        """Lease the pool for ``epoch`` and map its pages read-write. On any error nothing stays mapped or leased.

        Raises:
            gms.client.GmsError: refused (an older epoch), no memory, or the service is gone.
        """
        if self._lease is not None:
            raise RuntimeError("the KV pages are mapped already")
        client = self._service.connect()
        lease: Lease | None = None
        try:
            lease = client.attach(KV_POOL, LeaseMode.RW, epoch=epoch, timeout_seconds=self._service.proof_seconds)
            pages: Allocation
            with lease.allocate(KV_TAG, self.range.size_bytes) as pages:
                self.range.unmap()
                self.range.map(pages.fd, writable=True)
        except BaseException:
            # Quiesced, since nothing is mapped: otherwise the next engine would wait for this living one's death.
            self.range.unmap()
            _give_back(client, lease)
            raise
        if lease.fresh:
            logger.info("kv: new pages for epoch %d: the service had none to hand on", epoch)
        self._client, self._lease = client, lease

    def unmap(self) -> None:
        """Take the pages away and give the lease back quiesced: the caller vouches that nothing writes any more."""
        lease, client = self._lease, self._client
        self._lease = self._client = None
        self.range.unmap()
        if client is not None:
            _give_back(client, lease)

    def close(self) -> None:
        """Unmap and give the address range back."""
        try:
            self.unmap()
        finally:
            self.range.close()


def _give_back(client: GmsClient, lease: Lease | None) -> None:
    """Release and hang up. A service that is gone, or has forgotten the lease, has nothing that could be given back."""
    try:
        if lease is not None:
            lease.release(quiesced=True)
    except GmsError as error:
        logger.warning("kv: the lease could not be released: %s", error)
    finally:
        client.close()
