"""One engine's KV pages: their lease, the range that they are mapped at, and the index beside them.

What must be paired has one owner here: a lease with its mapping, descriptors with their close, an address range with
the engine's whole life. Calls block, as those of ``workers.memory`` do.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.custody import Custody
from gms.custody_phases import CustodyState
from gms.mapping import Reservation
from gms.protocol import HOST_TAG, ErrorCode
from workers.fault_mark import FaultMark
from workers.kv_index import FAULT_OFFSET, TOKEN_BYTES, Entry, KvIndex, Refusal, Shape
from workers.memory import KV_POOL, MemoryService
from workers.waits import Waits

logger = logging.getLogger(__name__)

_BINDING_BYTES: Final = 8
"""Of a token: which pages of other ranks it is for."""
KV_TAG = "kv"
INDEX_TAG = f"{HOST_TAG}kv-index"
"""The prefix index is an allocation of the same pool: it has the pages' epoch, holder, proof and custody, and is handed
on, or left behind, with them and never alone."""
SCRATCH_CHUNK_BYTES: Final = 4 * 1024 * 1024
SCRATCH_MAPPINGS: Final = 1024
"""Enough for 4 GiB of KV cache at the smallest chunk; beyond that the chunk grows with the range."""


class Carried(NamedTuple):
    """What a promotion found of the engine before."""

    entries: Sequence[Entry]
    """What the pages hold, in the order in which it may be given up."""
    refusal: Refusal | None
    """Why that is nothing. None: the index was believed, and may yet be empty."""
    detail: str = ""


class KvMemory:
    """The KV cache: an address range for life, pages of the service behind it only while active.

    The range is reserved once, so that tensors (and on a GPU captured graphs) keep their addresses over every park and
    wake. Pages stay allocated in the service across engines: waking maps them, and allocates only the first time.

    What they hold is in the index beside them (``workers.kv_index``), if the engine keeps one. Which pages an index
    speaks of is told by a token that is in both, in its header and in the pool's manifest; whoever uses the pages
    without keeping the index takes it out of the manifest before the first write. Of several ranks rank 0 has the
    index, and its token names the pages of the others as well: by their marks, which are in their pools' manifests.
    """

    def __init__(self, service: MemoryService, *, size_bytes: int) -> None:
        self._service = service
        self._custody: Custody | None = None
        self._asking: GmsClient | None = None  # the connection of a `map` under way
        self._interrupted = False
        self._shape: Shape | None = None
        self._why_none: tuple[Refusal, str] = (Refusal.OFF, "")
        self._mark = FaultMark()
        self._follows = False
        self._bound = b""
        self.waits: Final = Waits()
        """How long ``map`` has waited for the service."""
        self.mark = b""
        """Of the pages that were mapped last, if this one follows an index: a random name."""
        self.range = Reservation(size_bytes, memory=service.device_memory())
        self.index_range: Reservation | None = None
        self.index: KvIndex | None = None
        """To be written to while the pages are mapped; closed, and of no effect, once they are not."""
        self.carried = Carried((), Refusal.OFF)
        """What the last ``map`` found."""

    def keep_index(self, shape: Shape) -> None:
        """Keep an index from the next ``map`` on. Once, and while nothing is mapped.

        Raises:
            gms.client.GmsError: no addresses for it.
        """
        if self._shape is not None or self._custody is not None:
            raise RuntimeError("an index is kept from the beginning")
        unit = self.range.memory.granularity  # of the pool's device, which its allocations are multiples of
        self.index_range = Reservation(-(-shape.size_bytes // unit) * unit)
        self._shape = shape

    def follow(self) -> None:
        """Let these pages be told from any others, for an index that is beside another rank's. Once, and while nothing
        is mapped: from the next ``map`` on, ``mark`` is another one whenever the pages are new, or were somebody's who
        did not follow."""
        if self._custody is not None:
            raise RuntimeError("an index is followed from the beginning")
        self._follows = True

    def keep_none(self, refusal: Refusal, detail: str = "") -> None:
        """Say why no index is kept."""
        self._why_none = (refusal, detail)

    @property
    def index_bytes(self) -> int:
        """Of the index, mapped or not; 0 if none is kept."""
        return self.index_range.size_bytes if self.index_range is not None else 0

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

    def map(self, *, epoch: int, marks: Sequence[bytes] = ()) -> None:
        """Lease the pool for ``epoch`` and map its pages read-write. On any error nothing stays mapped or leased.
        ``marks`` are those of the other ranks' pages, which are mapped already: the index is believed only if it was
        written beside these.

        A service that dies meanwhile is started again, so it is asked again as long as one would be waited for.

        Raises:
            gms.client.GmsError: refused (an older epoch), no memory, or the service is gone.
        """
        if self._custody is not None:
            raise RuntimeError("the KV pages are mapped already")
        waits = self._service.proof_seconds + self._service.memory_wait_seconds
        self._bound = blake2b(b"".join(marks), digest_size=_BINDING_BYTES).digest() if marks else b""
        self._custody = self._service.ask(KV_POOL, partial(self._map, epoch), seconds=waits, waits=self.waits)

    def _map(self, epoch: int, client: GmsClient) -> Custody:
        lease: Lease | None = None
        pages: list[Allocation] = []
        try:
            self._begin(client)
            with self.waits.waiting():
                lease = client.attach(KV_POOL, LeaseMode.RW, epoch=epoch, timeout_seconds=self._service.proof_seconds)
                pages.append(self._service.allocate(lease, KV_TAG, self.range.size_bytes))
            self._open_index(lease, pages)
            self.range.map(pages[0].chunks, writable=True)
            if not self.carried.entries:  # an engine may have died between getting pages and clearing them
                self._clear()
            self._asking = None
            custody = self._service.keep(client, lease, pages)
        except BaseException as error:
            # Quiesced if nothing is mapped: otherwise the next engine waits for this living one's death.
            unmapped = _tried(self.range.unmap, beside=error) and _tried(self._close_index, beside=error)
            for allocation in pages:
                allocation.close()
            if lease is not None and unmapped:
                _tried(partial(lease.release, quiesced=True), beside=error)
            client.close()
            raise
        finally:
            self._asking = None
        if lease.fresh:
            logger.info("kv: new pages for epoch %d: the service had none to hand on", epoch)
        return custody

    def _open_index(self, lease: Lease, pages: list[Allocation]) -> None:
        """Find out what the pages hold, and be ready to go on with it. Before they are mapped: from here on nobody will
        take what was written about them by others for the truth.

        Raises:
            gms.client.GmsError: the service is gone, or says that a newer epoch has the pages.
        """
        refusal, detail = self._why_none
        self._close_index()
        if self._shape is not None and self.index_range is not None:
            try:
                index = self._map_index(lease, pages, self._shape, self.index_range)
            except GmsError as error:
                if error.code not in (ErrorCode.SIZE_MISMATCH, ErrorCode.OUT_OF_MEMORY):
                    raise
                sized = error.code == ErrorCode.SIZE_MISMATCH
                refusal, detail = Refusal.CONFIGURATION if sized else Refusal.UNSUPPORTED, str(error)
            except OSError as error:  # it cannot mark a fault, and so must not ask to be believed
                self._close_index()
                refusal, detail = Refusal.UNSUPPORTED, f"a memory fault could not be marked: {error}"
            else:
                self.carried = self._take_over(index, lease)
                self.index = index
                return
        self.carried = Carried((), refusal, detail)
        held = {allocation.tag for allocation in pages}
        # One that others keep is held all the same: a service that starts again wants all of a pool's pages back.
        with self.waits.waiting():
            pages += [lease.export(info.tag) for info in lease.allocations if info.tag not in held]
        if self._follows:
            if lease.fresh or not lease.manifest:
                self._put(lease, secrets.token_bytes(TOKEN_BYTES))
            self.mark = lease.manifest
        elif lease.manifest:
            self._put(lease, b"")

    def _put(self, lease: Lease, manifest: bytes) -> None:
        with self.waits.waiting():
            lease.put_manifest(manifest)

    def _map_index(self, lease: Lease, pages: list[Allocation], shape: Shape, place: Reservation) -> KvIndex:
        with self.waits.waiting():
            kept = self._service.allocate(lease, INDEX_TAG, place.size_bytes)
        pages.append(kept)
        place.map(kept.chunks, writable=True)
        self._mark.arm(kept.fd, FAULT_OFFSET)
        return KvIndex(memoryview(place.buffer()).cast("B").cast("Q"), shape)

    def _take_over(self, index: KvIndex, lease: Lease) -> Carried:
        refusal = Refusal.NEW_PAGES if lease.fresh else index.refusal(token=lease.manifest, epoch=lease.epoch)
        if refusal is None and not lease.manifest.endswith(self._bound):
            refusal = Refusal.OTHER_PAGES
        entries = index.entries() if refusal is None else None
        if entries is not None:
            index.go_on(epoch=lease.epoch)
            return Carried(entries, None)
        refusal = refusal or Refusal.DAMAGED
        detail = index.fault if refusal is Refusal.FAULT else ""
        token = secrets.token_bytes(TOKEN_BYTES - len(self._bound)) + self._bound
        index.begin(token=token, epoch=lease.epoch)
        self._put(lease, token)
        return Carried((), refusal, detail)

    def _close_index(self) -> None:
        """Nothing is written from here on, then the memory goes."""
        if self.index is not None:
            self.index.close()
        self._mark.disarm()
        if self.index_range is not None:
            self.index_range.unmap()

    def _begin(self, client: GmsClient) -> None:
        """From here on ``interrupt`` can end what waits."""
        self._asking = client
        if self._interrupted:
            raise GmsError(ErrorCode.CLOSED, "The wait for KV pages was ended by its owner.")

    def map_scratch(self) -> None:
        """Back the range so that steps can run, with memory that is worth nothing: one small chunk again and again."""
        if self._custody is not None:
            raise RuntimeError("the KV pages are mapped: nothing may be tried out over them")
        size = self.range.size_bytes
        self.range.map_scratch(max(SCRATCH_CHUNK_BYTES, size // SCRATCH_MAPPINGS))
        self._clear()

    def _clear(self) -> None:
        """Kernels may read what no request has written, if only to multiply it by zero; on a GPU that may be no
        number."""
        if not self.range.memory.zeroed:
            self.range.clear()

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Around steps that are to be tried out."""
        self.map_scratch()
        try:
            yield
        finally:
            self.range.unmap()

    def check_parked(self) -> str | None:
        """What stands behind the range though nothing should, a sentence, or None."""
        if self._custody is not None:
            return "its KV pages are mapped though it is parked"
        problem = self.range.fault()
        return None if problem is None else f"the addresses of its KV cache are not free: {problem}"

    def interrupt(self) -> None:
        """End a ``map`` that waits in another thread, and every later one, with ``closed``: the engine is to end."""
        self._interrupted = True
        if (client := self._asking) is not None:
            client.close()

    def unmap(self) -> None:
        """Take the pages away and give the lease back quiesced: the caller vouches that nothing writes any more, and
        that the step which wrote last is over. What the index says then is what the next engine finds. If it fails,
        pages may still be mapped and are held on to; it can be tried again."""
        self._close_index()
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
                if self.index_range is not None:
                    self.index_range.close()


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
