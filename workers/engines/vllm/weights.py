"""How a model's tensors lie in the memory service: the layout key, the manifest, and the engine's hold on the pages.

One pool per layout. The engine that comes first writes: it packs all tensors into one arena, commits with a manifest
that says where each is, and from then on is a reader like everyone else. Nothing here knows vLLM; ``loader`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from gms.client import GmsClient, Lease, LeaseMode
from gms.mapping import Reservation
from workers.memory import MemoryService

ARENA_TAG: Final = "weights"
ALIGNMENT: Final = 4096
"""A page: a tensor never shares one with its neighbour, so that what is read is what is resident."""

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.safetensors.index.json")


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One storage in the arena, and the tensor over it."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    """In elements, as torch counts it."""
    dtype: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to build the model without the checkpoint."""

    size_bytes: int
    parameters: dict[str, Slot]
    buffers: dict[str, Slot]
    aliases: dict[str, str]
    """Name of a tied tensor → the name it is stored under."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises:
        msgspec.DecodeError: not a manifest.
        """
        return msgspec.msgpack.decode(raw, type=cls)


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
    }
    return hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()


def pool_name(key: str) -> str:
    return f"weights/{key}"


class SlotPlanner:
    """Gives each distinct storage a place in the arena."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def place(self, size_bytes: int) -> int:
        """The offset for ``size_bytes`` more."""
        offset = self.size_bytes
        self.size_bytes += -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT
        return offset


class WeightsMemory:
    """An engine's hold on one weights pool: the lease, and the range its pages are mapped at, for the engine's life."""

    def __init__(self, client: GmsClient, lease: Lease) -> None:
        self._client = client
        self._lease = lease
        self._range: Reservation | None = None
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
        return cls(client, lease)

    @property
    def manifest(self) -> Manifest:
        """What the writer committed."""
        return Manifest.decode(self._lease.manifest)

    def map_for_writing(self, size_bytes: int) -> Any:
        """Fresh pages, writable; returns the arena as a ctypes array."""
        self._range = Reservation(size_bytes)
        with self._lease.allocate(ARENA_TAG, self._range.size_bytes) as pages:
            self._range.map(pages.fd, writable=True)
        return self._range.buffer()

    def commit(self, manifest: Manifest) -> None:
        """Publish, and go on as a reader at the same addresses. Nothing may touch the arena meanwhile."""
        arena = self._mapped()
        arena.unmap()
        self._lease.commit(manifest.encode())
        self._map_read_only(arena)

    def map_for_reading(self, size_bytes: int) -> Any:
        """The committed pages, read-only: a write to them is a SIGSEGV."""
        self._range = Reservation(size_bytes)
        self._map_read_only(self._range)
        return self._range.buffer()

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether these bytes lie in the service's pages."""
        if self._range is None:
            return False
        start, end = self._range.address, self._range.address + self._range.size_bytes
        return start <= address and address + size_bytes <= end

    def close(self) -> None:
        """Give everything back after a failed load. A loaded engine keeps its hold until its process ends."""
        if self._range is not None:
            self._range.close()
        self._client.close()

    def _map_read_only(self, arena: Reservation) -> None:
        with self._lease.export(ARENA_TAG) as pages:
            arena.map(pages.fd, writable=False)

    def _mapped(self) -> Reservation:
        if self._range is None:
            raise RuntimeError("no arena is mapped")
        return self._range


def check_known(wanted: Iterable[str], manifest: Manifest) -> None:
    """Raises:
    ValueError: the model has parameters that the manifest does not.
    """
    missing = sorted(set(wanted) - set(manifest.parameters) - set(manifest.aliases))
    if missing:
        raise ValueError(f"the shared weights lack {len(missing)} parameters of this model, {missing[0]} among them")
