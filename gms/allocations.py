"""What is allocated, for whom, and whether more fits. Pure: pages are whatever the backend calls them.

An entry is reserved before its pages exist, so that requests that are filled at the same time cannot together exceed
the limit, and it is cancelled if they cannot be had. Entries belong to a (pool, generation) and go with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from gms.backends.base import Identity
from gms.protocol import AllocationInfo, ErrorCode, GmsError

MAX_CHUNKS: Final = 8192
"""All allocations together: all must fit into one status reply. Each also costs descriptors of the service, whose
process may have fewer."""

P = TypeVar("P")


class NoRoomError(GmsError):
    """out_of_memory: it would fit if `missing_bytes` more were free."""

    def __init__(self, message: str, *, missing_bytes: int, retryable: bool) -> None:
        super().__init__(ErrorCode.OUT_OF_MEMORY, message, retryable=retryable)
        self.missing_bytes = missing_bytes


@dataclass(slots=True, eq=False)
class Entry(Generic[P]):
    """One allocation, in chunks. `owner` is who asked for it ("engine a"), `client` its number, 0 for one of an earlier
    service. `pages` has None where a chunk is not filled yet, or not handed back; `digests` are those of its pieces,
    in the order of `gms.integrity.pieces`, once it is committed. `frozen` is false for one that was being committed
    when the service died: it may have been frozen since it was identified. A table makes the list of pages when it
    takes the entry: until then nothing is as long as a client likes."""

    pool: str
    generation: int
    tag: str
    size_bytes: int
    chunk_bytes: int
    owner: str
    client: int = 0
    identities: list[Identity] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    frozen: bool = True
    pages: list[P | None] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """How many it is made of."""
        return -(-self.size_bytes // self.chunk_bytes)

    @property
    def filled(self) -> bool:
        return len(self.pages) == self.chunks and None not in self.pages

    def chunk_size(self, index: int) -> int:
        """Bytes of chunk number `index`."""
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)


class AllocationTable(Generic[P]):
    """`limit_bytes`: the most that may be allocated at a time, None for no limit; `max_chunks` likewise, of chunks."""

    def __init__(self, limit_bytes: int | None = None, *, max_chunks: int = MAX_CHUNKS) -> None:
        self.limit_bytes = limit_bytes
        self._max_chunks = max_chunks
        self._entries: dict[tuple[str, int], dict[str, Entry[P]]] = {}
        self._manifests: dict[tuple[str, int], bytes] = {}
        self._chunks = 0
        self._by_pool: Counter[str] = Counter()
        self._high_by_pool: Counter[str] = Counter()
        self.total_bytes = 0
        self.high_water_bytes = 0

    def reserve(self, entry: Entry[P], *, lasting: Callable[[], int] = lambda: 0) -> None:
        """Makes room for an allocation. `lasting` is how many bytes stay, whatever goes by itself.

        Raises NoRoomError, retryable if it fits beside those; GmsError: too_many, exists, size_mismatch.
        """
        if (existing := self.get(entry.pool, entry.generation, entry.tag)) is not None:
            if existing.size_bytes == entry.size_bytes:
                raise GmsError(
                    ErrorCode.EXISTS,
                    f"{entry.tag!r} is allocated in {entry.pool} already; export it, or use another tag.",
                )
            raise GmsError(
                ErrorCode.SIZE_MISMATCH,
                f"{entry.tag!r} exists in {entry.pool} with {existing.size_bytes} bytes, {entry.size_bytes} were asked "
                "for; use another tag, or engines of one configuration.",
            )
        if self._chunks + entry.chunks > self._max_chunks:
            raise GmsError(ErrorCode.TOO_MANY, self._too_many(entry))
        if self.limit_bytes is not None and self.total_bytes + entry.size_bytes > self.limit_bytes:
            fits = self.fits_beside(lasting(), entry)
            missing = self.total_bytes + entry.size_bytes - self.limit_bytes
            raise NoRoomError(self._full(entry, fits), missing_bytes=missing, retryable=fits)
        self.restore(entry)

    def fits_beside(self, held_bytes: int, entry: Entry[P]) -> bool:
        """Whether the limit allows an allocation if no more than this is held; with 0, whether it ever can."""
        return self.limit_bytes is None or held_bytes + entry.size_bytes <= self.limit_bytes

    def restore(self, entry: Entry[P]) -> None:
        """Counts an allocation that stands already, whatever the limit."""
        entry.pages = [None] * entry.chunks
        self._entries.setdefault((entry.pool, entry.generation), {})[entry.tag] = entry
        self._chunks += entry.chunks
        self.total_bytes += entry.size_bytes
        self.high_water_bytes = max(self.high_water_bytes, self.total_bytes)
        self._by_pool[entry.pool] += entry.size_bytes
        self._high_by_pool[entry.pool] = max(self._high_by_pool[entry.pool], self._by_pool[entry.pool])

    def cancel(self, entry: Entry[P]) -> bool:
        """Takes a reservation back. False if it went with its generation before."""
        entries = self._entries.get((entry.pool, entry.generation), {})
        if entries.get(entry.tag) is not entry:
            return False
        del entries[entry.tag]
        if not entries:
            del self._entries[entry.pool, entry.generation]
        self._forget(entry)
        return True

    def holds(self, entry: Entry[P]) -> bool:
        return self.get(entry.pool, entry.generation, entry.tag) is entry

    def get(self, pool: str, generation: int, tag: str) -> Entry[P] | None:
        return self._entries.get((pool, generation), {}).get(tag)

    def entries(self, pool: str, generation: int) -> list[Entry[P]]:
        return list(self._entries.get((pool, generation), {}).values())

    def generations(self) -> list[tuple[str, int]]:
        return list(self._entries)

    def drop(self, pool: str, generation: int) -> list[Entry[P]]:
        """Forgets a generation and returns what was in it; the caller gives the pages back."""
        self._manifests.pop((pool, generation), None)
        dropped = list(self._entries.pop((pool, generation), {}).values())
        for entry in dropped:
            self._forget(entry)
        return dropped

    def info(self, pool: str, generation: int) -> list[AllocationInfo]:
        """What is filled and may be exported."""
        return [
            AllocationInfo(entry.tag, entry.size_bytes, entry.chunk_bytes)
            for entry in self.entries(pool, generation)
            if entry.filled
        ]

    def manifest(self, pool: str, generation: int) -> bytes:
        return self._manifests.get((pool, generation), b"")

    def put_manifest(self, pool: str, generation: int, manifest: bytes) -> None:
        self._manifests[pool, generation] = manifest

    def hand_over(self, pool: str, generation: int, owner: str) -> None:
        """The pages stay and count for `owner` from now on."""
        for entry in self.entries(pool, generation):
            entry.owner = owner

    def bytes_in(self, pool: str) -> int:
        return self._by_pool[pool]

    def high_water_in(self, pool: str) -> int:
        """The most that was ever allocated in the pool at a time."""
        return self._high_by_pool[pool]

    def bytes_by_owner(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        for entry in self._all():
            sums[entry.owner] += entry.size_bytes
        return sums

    def bytes_of(self, pool: str, generation: int) -> int:
        return sum(entry.size_bytes for entry in self.entries(pool, generation))

    def _all(self) -> Iterator[Entry[P]]:
        for entries in self._entries.values():
            yield from entries.values()

    def _forget(self, entry: Entry[P]) -> None:
        self._chunks -= entry.chunks
        self.total_bytes -= entry.size_bytes
        self._by_pool[entry.pool] -= entry.size_bytes
        if not self._by_pool[entry.pool] and entry.pool.startswith("weights/"):
            del self._by_pool[entry.pool], self._high_by_pool[entry.pool]  # names made of hashes would pile up

    def held(self, where: str = "") -> str:
        """Who holds what, the largest first, for people; ``where`` is a word for that."""
        pairs: Counter[str] = Counter()
        for entry in self._all():
            pairs[f"{entry.pool} of {entry.owner}"] += entry.size_bytes
        shown = ", ".join(f"{amount} by {who}" for who, amount in pairs.most_common(5))
        where = f" {where}" if where else ""
        return f"held{where} are {shown}" if shown else f"nothing is held{where}"

    def _full(self, entry: Entry[P], fits: bool) -> str:
        next_ = "Part of that will go by itself: try again, or raise" if fits else "Raise"
        return (
            f"{entry.size_bytes} bytes for {entry.tag!r} in {entry.pool} do not fit: the memory limit is "
            f"{self.limit_bytes}, {self.held()}. {next_} --memory-limit (of a pod: --gms-memory-limit-bytes, "
            f"HOTSPARE_GMS_MEMORY_LIMIT_BYTES){', or end one of them' if self.total_bytes else ''}."
        )

    def _too_many(self, entry: Entry[P]) -> str:
        files = self._max_chunks < MAX_CHUNKS
        return (
            f"{self._chunks} chunks of memory stand already, {entry.chunks} more are too many (the most is "
            f"{self._max_chunks}{', since this service may not open more files' if files else ''}); allocate fewer and "
            f"larger ones, {'allow it more (ulimit -n), ' if files else ''}or raise --chunk-size "
            "(HOTSPARE_GMS_CHUNK_SIZE)."
        )
