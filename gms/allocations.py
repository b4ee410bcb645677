"""What is allocated, for whom, and whether more fits. Pure: pages are whatever the backend calls them.

An entry is reserved before its pages exist, so that requests that are filled at the same time cannot together exceed
the limit, and it is cancelled if they cannot be had. Entries belong to a (pool, generation) and go with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gms.protocol import AllocationInfo, ErrorCode, GmsError

MAX_ALLOCATIONS: Final = 8192
"""All generations together. Each costs one descriptor of the service, and all must fit into one status reply."""

P = TypeVar("P")


@dataclass(slots=True, eq=False)
class Entry(Generic[P]):
    """`owner` is who asked for it ("engine a"); `pages` is None until the backend has filled them."""

    pool: str
    generation: int
    tag: str
    size_bytes: int
    owner: str
    pages: P | None = None


class AllocationTable(Generic[P]):
    """`limit_bytes`: the most that may be allocated at a time, None for no limit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._entries: dict[tuple[str, int], dict[str, Entry[P]]] = {}
        self._manifests: dict[tuple[str, int], bytes] = {}
        self._count = 0
        self.total_bytes = 0

    def reserve(self, pool: str, generation: int, tag: str, size_bytes: int, owner: str) -> Entry[P]:
        """Room for an allocation. Raises GmsError: out_of_memory, too_many, exists, size_mismatch."""
        if (existing := self.get(pool, generation, tag)) is not None:
            if existing.size_bytes == size_bytes:
                raise GmsError(
                    ErrorCode.EXISTS, f"{tag!r} is allocated in {pool} already; export it, or use another tag."
                )
            raise GmsError(
                ErrorCode.SIZE_MISMATCH,
                f"{tag!r} exists in {pool} with {existing.size_bytes} bytes, {size_bytes} were asked for; "
                "use another tag, or engines of one configuration.",
            )
        if self._count >= MAX_ALLOCATIONS:
            raise GmsError(
                ErrorCode.TOO_MANY,
                f"{MAX_ALLOCATIONS} allocations stand already; allocate fewer and larger ones.",
            )
        if self.limit_bytes is not None and self.total_bytes + size_bytes > self.limit_bytes:
            raise GmsError(ErrorCode.OUT_OF_MEMORY, self._full(pool, tag, size_bytes), retryable=True)
        entry: Entry[P] = Entry(pool, generation, tag, size_bytes, owner)
        self._entries.setdefault((pool, generation), {})[tag] = entry
        self._count += 1
        self.total_bytes += size_bytes
        return entry

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
        return [AllocationInfo(e.tag, e.size_bytes) for e in self.entries(pool, generation) if e.pages is not None]

    def manifest(self, pool: str, generation: int) -> bytes:
        return self._manifests.get((pool, generation), b"")

    def put_manifest(self, pool: str, generation: int, manifest: bytes) -> None:
        self._manifests[pool, generation] = manifest

    def hand_over(self, pool: str, generation: int, owner: str) -> None:
        """The pages stay and count for `owner` from now on."""
        for entry in self.entries(pool, generation):
            entry.owner = owner

    def bytes_by_pool(self) -> Counter[str]:
        return self._sum("pool")

    def bytes_by_owner(self) -> Counter[str]:
        return self._sum("owner")

    def bytes_of(self, pool: str, generation: int) -> int:
        return sum(entry.size_bytes for entry in self.entries(pool, generation))

    def _sum(self, by: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for entries in self._entries.values():
            for entry in entries.values():
                sums[getattr(entry, by)] += entry.size_bytes
        return sums

    def _forget(self, entry: Entry[P]) -> None:
        self._count -= 1
        self.total_bytes -= entry.size_bytes

    def _full(self, pool: str, tag: str, size_bytes: int) -> str:
        pairs: Counter[str] = Counter()
        for (name, _), entries in self._entries.items():
            for entry in entries.values():
                pairs[f"{name} of {entry.owner}"] += entry.size_bytes
        holders = ", ".join(f"{amount} by {who}" for who, amount in pairs.most_common(5)) or "nothing"
        return (
            f"{size_bytes} bytes for {tag!r} in {pool} do not fit: the memory limit is {self.limit_bytes}, held are "
            f"{holders}. Raise --memory-limit, or end one of them."
        )
