"""One engine's memory in its pod: leases on the service's pools, and the ranges its pages are mapped at.

Both engines go through this: the sim engine directly, vLLM's worker from its own thread. It owns what must be paired:
a lease with its mapping, descriptors with their close, an address range with the engine's whole life. What is held for
long is in custody (``gms.custody``): it outlives the service, and is handed back to the next one. Calls block (they
talk to the service over a socket) and belong in a thread when made from an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.custody import Custody
from gms.custody_phases import CustodyState
from gms.mapping import DeviceMemory, Reservation, device_memory
from gms.protocol import ErrorCode

logger = logging.getLogger(__name__)

KV_POOL = "kv"
KV_TAG = "kv"
DIAL_SECONDS: Final = 2.0
"""How long one try of a custody may take; it tries again."""
RETRY_SECONDS: Final = 0.05


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
    hand_on_seconds: float = 2.0
    """How long parking waits for a service that is starting again, so that the KV pages are handed on and not lost."""

    @property
    def path(self) -> Path:
        return Path(self.socket)

    def connect(self) -> GmsClient:
        """A connection of its own: leases end with it.

        Raises:
            gms.client.GmsError: nobody answers within ``connect_seconds``.
        """
        return self._connect(timeout_seconds=self.connect_seconds, retry_seconds=self.connect_seconds)

    def keep(self, client: GmsClient, lease: Lease, allocations: Sequence[Allocation]) -> Custody:
        """Puts a lease with its connection and all its allocations into custody, which owns them from here on."""
        return Custody(client, lease, allocations, dial=self._dial)

    def device_memory(self) -> DeviceMemory:
        """How this process maps the service's pages.

        Raises:
            gms.client.GmsError: there is no such device here.
        """
        return device_memory(self.device)

    def kv_fence(self) -> int:
        """The highest epoch that the KV pool has seen, 0 before the first: an engine must come with a higher one.

        Raises:
            gms.client.GmsError: nobody answers within ``connect_seconds``.
        """
        with self.connect() as client:
            status = client.status(timeout_seconds=self.connect_seconds)
        return max((pool.epoch for pool in status.pools if pool.name == KV_POOL), default=0)

    def _dial(self) -> GmsClient:
        return self._connect(timeout_seconds=DIAL_SECONDS, retry_seconds=0.0)

    def _connect(self, *, timeout_seconds: float, retry_seconds: float) -> GmsClient:
        return GmsClient.connect(
            self.path,
            engine=self.engine,
            instance=self.instance,
            device=self.device,
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
        )


class KvMemory:
    """The KV cache: an address range for life, pages of the service behind it only while active.

    The range is reserved once, so that tensors (and on a GPU captured graphs) keep their addresses over every park and
    wake. Pages stay allocated in the service across engines: waking maps them, and allocates only the first time.
    """

    def __init__(self, service: MemoryService, *, size_bytes: int) -> None:
        self._service = service
        self._custody: Custody | None = None
        self.range = Reservation(size_bytes, memory=service.device_memory())

    @property
    def mapped(self) -> bool:
        """Whether the service's pages are behind the range."""
        return self._custody is not None

    @property
    def lost(self) -> str | None:
        """Why the pages must not be used any more and this engine must stop, or None."""
        custody = self._custody
        return custody.lost if custody is not None else None

    def custody(self) -> tuple[CustodyState, ...]:
        """How the custody stands; empty while there is none."""
        custody = self._custody
        return () if custody is None else (custody.state(),)

    def map(self, *, epoch: int) -> None:
        """Lease the pool for ``epoch`` and map its pages read-write. On any error nothing stays mapped or leased.

        A service that dies meanwhile is started again, so it is asked again as long as one would be waited for.

        Raises:
            gms.client.GmsError: refused (an older epoch), no memory, or the service is gone.
        """
        if self._custody is not None:
            raise RuntimeError("the KV pages are mapped already")
        deadline = time.monotonic() + self._service.connect_seconds
        told = False
        while self._custody is None:
            try:
                self._custody = self._map(epoch)
            except GmsError as error:
                if error.code != ErrorCode.SERVICE_GONE or time.monotonic() + RETRY_SECONDS > deadline:
                    raise
                if not told:
                    logger.warning("kv: asking again until a memory service answers: %s", error)
                told = True
                time.sleep(RETRY_SECONDS)

    def _map(self, epoch: int) -> Custody:
        client = self._service.connect()
        lease: Lease | None = None
        pages: Allocation | None = None
        try:
            lease = client.attach(KV_POOL, LeaseMode.RW, epoch=epoch, timeout_seconds=self._service.proof_seconds)
            pages = lease.allocate(KV_TAG, self.range.size_bytes)
            self.range.map(pages.chunks, writable=True)
        except BaseException:
            # Quiesced, since nothing is mapped: otherwise the next engine would wait for this living one's death.
            self.range.unmap()
            if pages is not None:
                pages.close()
            _give_back(client, lease)
            raise
        if lease.fresh:
            logger.info("kv: new pages for epoch %d: the service had none to hand on", epoch)
        return self._service.keep(client, lease, [pages])

    def unmap(self) -> None:
        """Take the pages away and give the lease back quiesced: the caller vouches that nothing writes any more."""
        custody, self._custody = self._custody, None
        self.range.unmap()
        if custody is not None:
            custody.release(quiesced=True, wait_seconds=self._service.hand_on_seconds)

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
        if error.code != ErrorCode.SERVICE_GONE:
            logger.warning("kv: the lease could not be released: %s", error)
    finally:
        client.close()
