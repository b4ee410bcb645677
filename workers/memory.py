"""The pod's memory service as one engine uses it: how it is reached, as whom, and how long anything may take.

Both engines go through this: the sim engine directly, vLLM's worker from its own thread. What is held for long is in
custody (``gms.custody``): it outlives the service, and is handed back to the next one. Calls block (they talk to the
service over a socket) and belong in a thread when made from an event loop.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gms.client import Allocation, GmsClient, GmsError, Lease
from gms.custody import Custody
from gms.mapping import DeviceMemory, device_memory
from gms.protocol import ErrorCode
from workers.waits import Waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

KV_POOL = "kv"
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

    fenced_pids: tuple[int, ...] = ()
    """The engine's other ranks: pages are handed on only when they are dead too."""
    peers: tuple[MemoryService, ...] = ()
    """Rank 0 alone: the services of its other ranks, whose epochs count as well."""

    @property
    def path(self) -> Path:
        return Path(self.socket)

    def fenced_with(self, pids: Sequence[int]) -> MemoryService:
        """The same, for a process that shares its fate with these."""
        return msgspec.structs.replace(self, fenced_pids=tuple(pids))

    @property
    def longest_wait_seconds(self) -> float:
        """The longest that mapping KV pages may wait, for a service that starts again in the middle of it."""
        return self.connect_seconds + 2 * (self.proof_seconds + self.memory_wait_seconds)

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

    def ask(self, pool: str, call: Callable[[GmsClient], T], *, seconds: float, waits: Waits | None = None) -> T:
        """What ``call`` makes of a new connection, which is its own from then on, to be closed if it fails.

        A service that dies meanwhile is started again: ``call`` begins anew with the next one, as long as none is away
        for ``connect_seconds``. ``seconds`` is how long ``call`` itself may take, and ``waits`` is told how long a
        service was waited for here; of its own waits ``call`` tells it.

        Raises:
            gms.client.GmsError: what ``call`` raises; nobody answers.
        """
        began = away_since = time.monotonic()
        waits = waits or Waits()
        told = False
        while True:
            connected = False
            try:
                with waits.waiting():
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
            with waits.waiting():
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
        """The highest epoch that a KV pool of this engine's devices has seen, 0 before the first: an engine must come
        with a higher one.

        Raises:
            gms.client.GmsError: nobody answers within ``connect_seconds``.
        """
        with self.connect() as client:
            status = client.status(timeout_seconds=self.connect_seconds)
        own = max((pool.epoch for pool in status.pools if pool.name == KV_POOL), default=0)
        return max(own, *(peer.kv_fence() for peer in self.peers)) if self.peers else own

    def _connect(self, *, timeout_seconds: float, retry_seconds: float) -> GmsClient:
        pidfds: list[int] = []
        try:
            for pid in self.fenced_pids:
                pidfds.append(os.pidfd_open(pid))
            return GmsClient.connect(
                self.path,
                engine=self.engine,
                instance=self.instance,
                device=self.device,
                pidfds=pidfds,
                timeout_seconds=timeout_seconds,
                retry_seconds=retry_seconds,
            )
        except ProcessLookupError as error:
            raise GmsError(ErrorCode.CLOSED, "A rank of this engine is gone, and the engine with it.") from error
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
