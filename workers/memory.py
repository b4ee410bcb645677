"""One engine's memory in its pod: leases on the service's pools, and the ranges its pages are mapped at.

Both engines go through this: the sim engine directly, vLLM's worker from its own thread. It owns what must be paired:
a lease with its mapping, descriptors with their close, an address range with the engine's whole life. What is held for
long is in custody (``gms.custody``): it outlives the service, and is handed back to the next one. Calls block (they
talk to the service over a socket) and belong in a thread when made from an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.custody import Custody
from gms.custody_phases import CustodyState
from gms.mapping import DeviceMemory, Reservation, device_memory
from gms.protocol import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
    memory_wait_seconds: float = 15.0
    """How long pages that are asked for may wait for room: what a dead engine held is given back in a moment."""
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

    def dial(self) -> GmsClient:
        """A connection of its own, tried for once.

        Raises:
            gms.client.GmsError: nobody answers.
        """
        return self._connect(timeout_seconds=DIAL_SECONDS, retry_seconds=0.0)

    def ask(self, pool: str, call: Callable[[GmsClient], T], *, seconds: float) -> T:
        """What ``call`` makes of a new connection, which is its own from then on, to be closed if it fails.

        A service that dies meanwhile is started again: ``call`` begins anew with the next one, as long as none is away
        for ``connect_seconds``. ``seconds`` is how long ``call`` itself may take.

        Raises:
            gms.client.GmsError: what ``call`` raises; nobody answers.
        """
        began = away_since = time.monotonic()
        told = False
        while True:
            connected = False
            try:
                client = self.connect()
                connected = True
                return call(client)
            except GmsError as error:
                now = time.monotonic()
                away_since = now if connected else away_since
                late = now + RETRY_SECONDS - self.connect_seconds > min(away_since, began + seconds)
                if error.code != ErrorCode.SERVICE_GONE or late:
                    raise
                if not told:
                    logger.warning("%s: asking again until a memory service answers: %s", pool, error)
                told = True
            time.sleep(RETRY_SECONDS)

    def allocate(self, lease: Lease, tag: str, size_bytes: int) -> Allocation:
        """Pages, waited for where room comes without anybody's doing: what the dead and the fenced have held.

        Raises:
            gms.client.GmsError: no room, and retryable if it only did not come in time.
        """
        try:
            return lease.allocate(tag, size_bytes)
        except GmsError as error:
            if error.code != ErrorCode.OUT_OF_MEMORY or not error.retryable or not self.memory_wait_seconds:
                raise
            logger.warning("%s: waiting up to %g s for room: %s", lease.pool, self.memory_wait_seconds, error)
        return lease.allocate(tag, size_bytes, timeout_seconds=self.memory_wait_seconds)

    def keep(self, client: GmsClient, lease: Lease, allocations: Sequence[Allocation]) -> Custody:
        """Puts a lease with its connection and all its allocations into custody, which owns them from here on."""
        return Custody(client, lease, allocations, dial=self.dial)

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
        self._asking: GmsClient | None = None  # the connection of a `map` under way
        self._interrupted = False
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
        waits = self._service.proof_seconds + self._service.memory_wait_seconds
        self._custody = self._service.ask(KV_POOL, partial(self._map, epoch), seconds=waits)

    def _map(self, epoch: int, client: GmsClient) -> Custody:
        lease: Lease | None = None
        pages: Allocation | None = None
        try:
            self._begin(client)
            lease = client.attach(KV_POOL, LeaseMode.RW, epoch=epoch, timeout_seconds=self._service.proof_seconds)
            pages = self._service.allocate(lease, KV_TAG, self.range.size_bytes)
            self.range.map(pages.chunks, writable=True)
            self._asking = None
            custody = self._service.keep(client, lease, [pages])
        except BaseException as error:
            # Quiesced if nothing is mapped: otherwise the next engine waits for this living one's death.
            unmapped = _tried(self.range.unmap, beside=error)
            if pages is not None:
                pages.close()
            if lease is not None and unmapped:
                _tried(partial(lease.release, quiesced=True), beside=error)
            client.close()
            raise
        finally:
            self._asking = None
        if lease.fresh:
            logger.info("kv: new pages for epoch %d: the service had none to hand on", epoch)
        return custody

    def _begin(self, client: GmsClient) -> None:
        """From here on ``interrupt`` can end what waits."""
        self._asking = client
        if self._interrupted:
            raise GmsError(ErrorCode.CLOSED, "The wait for KV pages was ended by its owner.")

    def interrupt(self) -> None:
        """End a ``map`` that waits in another thread, and every later one, with ``closed``: the engine is to end."""
        self._interrupted = True
        if (client := self._asking) is not None:
            client.close()

    def unmap(self) -> None:
        """Take the pages away and give the lease back quiesced: the caller vouches that nothing writes any more. If it
        fails, pages may still be mapped and are held on to; it can be tried again."""
        self.range.unmap()
        custody, self._custody = self._custody, None
        if custody is not None:
            custody.release(quiesced=True, wait_seconds=self._service.hand_on_seconds)

    def close(self) -> None:
        """Unmap and give the address range back. Pages that cannot be unmapped are this process's until it ends, which
        the next engine waits for then."""
        try:
            self.unmap()
        finally:
            custody, self._custody = self._custody, None
            if custody is not None:
                custody.close()
            else:
                self.range.close()


def _tried(step: Callable[[], object], *, beside: BaseException) -> bool:
    """One step of clearing up after ``beside``, which stays the error that is raised; whether it succeeded."""
    try:
        step()
    except Exception as error:
        # A connection that is over has taken the lease with it: nothing is left that could be given back.
        if not (isinstance(error, GmsError) and error.code in (ErrorCode.SERVICE_GONE, ErrorCode.CLOSED)):
            logger.error("kv: clearing up failed too: %s", error)
            beside.add_note(f"Clearing up failed too: {type(error).__name__}: {error}")
        return False
    return True
