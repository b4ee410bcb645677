"""One engine's weights in the memory service: the lease on their pool, and the range their pages are mapped at.

One pool per layout. The engine that comes first writes all tensors into one arena and commits it, and from then on is a
reader like everyone else. Both engines go through this; neither torch nor vLLM is known here. A lease is in custody
(``gms.custody``) from the moment that it is a read lease, so that it outlives the service from then on; a service that
dies before that is asked again, and one that dies during a commit is followed by another (``gms.commit``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from gms.client import Allocation, AllocationInfo, GmsClient, GmsError, Lease, LeaseMode, digests_of
from gms.commit import commit_surely
from gms.custody import Custody
from gms.custody_phases import CustodyState
from gms.mapping import Reservation
from gms.protocol import Digests, ErrorCode
from gms.rotation import ALGORITHM, ALGORITHMS, Rotation
from workers.memory import MemoryService

logger = logging.getLogger(__name__)

ARENA_TAG: Final = "weights"


def pool_name(key: str) -> str:
    """``key`` names the layout: engines with the same key may share pages."""
    return f"weights/{key}"


class WeightsMemory:
    """Weights for the engine's life. ``attach`` first; then ``map_for_writing`` and ``commit`` if this engine is their
    writer, ``map_for_reading`` if it is a reader."""

    def __init__(self, service: MemoryService, pool: str) -> None:
        self.pool: Final = pool
        self.role = "private"
        self._service = service
        self._client: GmsClient | None = None
        self._dialled: GmsClient | None = None  # by a commit that goes on with another service
        self._lease: Lease | None = None
        self._pages: Allocation | None = None
        self._range: Reservation | None = None
        self._custody: Custody | None = None
        self._interrupted = False
        self._rotation: Rotation | None = None

    def attach(self) -> None:
        """Write, if nobody has committed this layout or is writing it; read otherwise, as soon as it is there.

        Raises:
            gms.client.GmsError: nobody answers, or the writer did not commit in time.
        """
        self._service.ask(self.pool, self._attach, seconds=self._service.timeout_seconds)

    def _attach(self, client: GmsClient) -> None:
        self._client = client
        try:
            self._check()
            lease = client.attach(self.pool, LeaseMode.RW_OR_RO, timeout_seconds=self._service.timeout_seconds)
            if lease.mode is LeaseMode.RO:
                self._pages = lease.export(ARENA_TAG)
                self._custody = self._service.keep(client, lease, [self._pages])
        except BaseException:
            self._drop_pages()
            client.close()
            raise
        self._lease = lease
        self.role = "writer" if lease.mode is LeaseMode.RW else "reader"

    @property
    def manifest(self) -> bytes:
        """What the writer committed, empty before it has."""
        return self._attached.manifest

    def map_for_writing(self, size_bytes: int) -> Reservation:
        """Fresh pages, writable. Where there is no room, it is waited for.

        Raises:
            gms.client.GmsError: no room; nothing is left behind once ``close`` was called.
        """
        self._pages = self._service.allocate(self._attached, ARENA_TAG, size_bytes)
        return self._map(self._pages, writable=True)

    def commit(self, manifest: bytes) -> None:
        """Publish, and go on as a reader at the same addresses. Nothing may touch the arena meanwhile.

        Raises:
            gms.client.GmsError: refused, or the service died and the next one does not know the pages.
        """
        client, lease, pages = self._client, self._attached, self._pages
        if self._range is None or client is None or pages is None:
            raise RuntimeError("no arena is mapped")
        digests = self._digests(self._range, pages, manifest)
        self._range.unmap()
        self._client, self._lease = commit_surely(client, lease, [pages], manifest, digests=digests, dial=self._dial)
        self._custody = self._service.keep(self._client, self._lease, [pages])
        self._map(pages, writable=False)

    def _digests(self, place: Reservation, pages: Allocation, manifest: bytes) -> Digests | None:
        """A GPU's memory is hashed by who has it mapped, which copies all of it to the host; None where the service
        hashes by itself."""
        if place.memory.open_to_service:
            return None
        info = AllocationInfo(pages.tag, pages.size_bytes, pages.chunk_bytes)
        return {pages.tag: digests_of(place, info, manifest, ALGORITHMS[ALGORITHM])}

    def map_for_reading(self) -> Reservation:
        """The committed pages, read-only: a write to them is a SIGSEGV."""
        if self._custody is None or self._pages is None:
            raise RuntimeError("nothing is committed that could be read")
        return self._map(self._pages, writable=False)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether these bytes lie in the service's pages."""
        if self._range is None:
            return False
        start, end = self._range.address, self._range.address + self._range.size_bytes
        return start <= address and address + size_bytes <= end

    def mirror(self, address: int, size_bytes: int, to: int) -> None:
        """Put these pages of the range at another address as well: ``Reservation.mirror``.

        Raises:
            ValueError: they are not all in the range, or no whole pages of host memory.
            OSError: from mremap.
        """
        if self._range is None or not self.holds(address, size_bytes):
            raise ValueError(f"{size_bytes} bytes at {address:#x} are not in {self.pool}")
        self._range.mirror(address - self._range.address, size_bytes, to)

    @property
    def lost(self) -> str | None:
        """Why the weights must not be used any more, or None."""
        custody = self._custody
        return custody.lost if custody is not None else None

    def custody(self) -> tuple[CustodyState, ...]:
        """How the custody stands; empty while there is none."""
        custody = self._custody
        return () if custody is None else (custody.state(),)

    def check(self, *, enough: Callable[[], bool]) -> str | None:
        """Whether the weights are mapped, shared, and what was committed, as far as is looked at until ``enough``;
        the next call goes on there. What is wrong, a sentence, or None. Reads through the mapping."""
        custody, pages, place = self._custody, self._pages, self._range
        if custody is None or pages is None or place is None:
            return "its weights are not attached"
        if (problem := custody.fault) is not None:
            return problem
        if (problem := place.fault(pages.chunks)) is not None:
            return f"its weights are not mapped as they were: {problem}"
        if self._rotation is None:
            self._rotation = self._new_rotation(place, pages)
        return self._rotation.advance(enough=enough) if self._rotation is not None else None

    def _new_rotation(self, place: Reservation, pages: Allocation) -> Rotation | None:
        """None: what to compare with cannot be had now."""
        lease = self._attached
        try:
            with self._service.dial() as client:
                reply = client.get_manifest(self.pool, digests=True)
        except GmsError as error:
            logger.debug("%s: the digests cannot be asked for now: %s", self.pool, error)
            return None
        algorithm = ALGORITHMS.get(reply.algorithm)
        digests = reply.digests.get(pages.tag, [])
        if algorithm is None or not digests or reply.generation != lease.generation:
            return None
        return Rotation(place, pages, lease.manifest, digests, algorithm)

    def interrupt(self) -> None:
        """End an ``attach`` or a ``commit`` that waits in another thread with ``closed``: the engine is to end."""
        self._interrupted = True
        if self._custody is None:
            for client in (self._client, self._dialled):
                if client is not None:
                    client.close()

    def hand_back(self) -> None:
        """End the lease and close the descriptors. The mapping stays, for tensors that may still be looked at. Twice is
        fine."""
        custody, self._custody = self._custody, None
        if custody is not None:
            custody.close()
            self._client = None
        self._drop_pages()

    def close(self) -> None:
        """Give everything back. Twice is fine."""
        custody, self._custody = self._custody, None
        client, self._client = self._client, None
        try:
            if self._range is not None:
                self._range.close()
        finally:
            if custody is not None:
                custody.close()
            elif client is not None:
                client.close()
            self._drop_pages()

    @property
    def _attached(self) -> Lease:
        if self._lease is None:
            raise RuntimeError(f"{self.pool} is not attached")
        return self._lease

    def _map(self, pages: Allocation, *, writable: bool) -> Reservation:
        if self._range is None:
            self._range = Reservation(pages.size_bytes, memory=self._service.device_memory())
        self._range.map(pages.chunks, writable=writable)
        return self._range

    def _dial(self) -> GmsClient:
        self._check()
        self._dialled = self._service.dial()
        if self._interrupted:  # meanwhile
            self._dialled.close()
        return self._dialled

    def _check(self) -> None:
        if self._interrupted:
            raise GmsError(ErrorCode.CLOSED, f"The wait for {self.pool} was ended by its owner.")

    def _drop_pages(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()
