"""The engine's hold on a model's weights in the memory service: the layout's name, the lease, and the mapping.

One pool per layout. The engine that comes first writes: it packs all tensors into one arena (``gms.tensors``), commits
with a manifest that says where each is, and from then on is a reader like everyone else. Nothing here knows vLLM or
torch; ``loader`` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from gms.client import Allocation, GmsClient, Lease, LeaseMode
from gms.custody import Custody
from gms.custody_phases import CustodyState
from gms.manifest import FORM, Manifest
from gms.mapping import Reservation
from workers.memory import MemoryService

ARENA_TAG: Final = "weights"

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.safetensors.index.json")


def layout_key(
    folder: Path, *, dtype: str, quantization: str | None, rank: int, world_size: int, engine_version: str
) -> str:
    """Names a layout: two engines with the same key may share pages.

    The checkpoint's content is stood for by the names, sizes and modification times of its files, since reading it is
    what sharing avoids.
    """
    files = sorted({path for pattern in _WEIGHT_PATTERNS for path in folder.glob(pattern)})
    described = {
        "config": (folder / "config.json").read_bytes(),
        "files": [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files],
        "dtype": dtype,
        "quantization": quantization,
        "rank": (rank, world_size),
        "engine": engine_version,
        "manifest": FORM,
    }
    return hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()


def pool_name(key: str) -> str:
    return f"weights/{key}"


class WeightsMemory:
    """An engine's hold on one weights pool: the lease, and the range its pages are mapped at, for the engine's life.

    Once the pages are mapped read-only the lease is in custody, with their descriptors, so that they can be handed back
    to a service that was restarted.
    """

    def __init__(self, service: MemoryService, client: GmsClient, lease: Lease) -> None:
        self._service = service
        self._client = client
        self._lease = lease
        self._pages: Allocation | None = None
        self._range: Reservation | None = None
        self._custody: Custody | None = None
        self.role = "writer" if lease.mode == LeaseMode.RW else "reader"

    @classmethod
    def attach(cls, service: MemoryService, key: str) -> WeightsMemory:
        """Write, if nobody has committed this layout or is writing it; read otherwise, as soon as it is there.

        Raises:
            gms.client.GmsError: nobody answers, or the writer did not commit in time.
        """
        client = service.connect()
        try:
            lease = client.attach(pool_name(key), LeaseMode.RW_OR_RO, timeout_seconds=service.timeout_seconds)
        except BaseException:
            client.close()
            raise
        return cls(service, client, lease)

    @property
    def manifest(self) -> Manifest:
        """What the writer committed.

        Raises:
            ValueError: something else than a model of this version was committed under this name.
        """
        try:
            return Manifest.decode(self._lease.manifest)
        except msgspec.DecodeError as error:
            raise ValueError(f"what is committed in {self._lease.pool} is no model's weights: {error}") from error

    def map_for_writing(self, size_bytes: int) -> Reservation:
        """Fresh pages, writable.

        Raises:
            gms.client.GmsError: no room; nothing is left behind once ``close`` was called.
        """
        self._pages = self._lease.allocate(ARENA_TAG, size_bytes)
        return self._map(self._pages, writable=True)

    def commit(self, manifest: Manifest) -> None:
        """Publish, and go on as a reader at the same addresses. Nothing may touch the arena meanwhile."""
        if self._range is None or self._pages is None:
            raise RuntimeError("no arena is mapped")
        self._range.unmap()
        self._lease.commit(manifest.encode())
        self._pages.close()
        self.map_for_reading()

    def map_for_reading(self) -> Reservation:
        """The committed pages, read-only: a write to them is a SIGSEGV."""
        self._pages = self._lease.export(ARENA_TAG)
        place = self._map(self._pages, writable=False)
        self._custody = self._service.keep(self._client, self._lease, [self._pages])
        return place

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether these bytes lie in the service's pages."""
        if self._range is None:
            return False
        start, end = self._range.address, self._range.address + self._range.size_bytes
        return start <= address and address + size_bytes <= end

    @property
    def lost(self) -> str | None:
        """Why the weights must not be used any more, or None."""
        custody = self._custody
        return custody.lost if custody is not None else None

    def custody(self) -> tuple[CustodyState, ...]:
        """How the custody stands; empty before the pages are mapped for reading."""
        return () if self._custody is None else (self._custody.state(),)

    def close(self) -> None:
        """Give everything back after a failed load. A loaded engine keeps its hold until its process ends."""
        if self._range is not None:
            self._range.close()
        if self._custody is not None:
            self._custody.close()
        else:
            self._client.close()
            if self._pages is not None:
                self._pages.close()

    def _map(self, pages: Allocation, *, writable: bool) -> Reservation:
        if self._range is None:
            self._range = Reservation(pages.size_bytes, memory=self._service.device_memory())
        self._range.map(pages.chunks, writable=writable)
        return self._range
