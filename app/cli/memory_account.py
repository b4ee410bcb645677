"""[P] Whose bytes a pod's memory is, in sums that add up.

Resident sizes do not add up: what several processes share is in each of them, the weights of a pair of engines above
all. The kernel's proportional sizes (PSS, proc(5)) do: a page that three processes have mapped is a third in each. So a
process costs its proportional size *without* the memory service's pages, the service's pages are counted once as what
the service says they are, and both together are the pod's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

VERSION: Final = 1
RANK: Final = "rank"
KEEPER: Final = "keeper"
SERVICE: Final = "memory service"
_SERVICE: Final = b" /memfd:gms:"
_FIELDS: Final = {b"Rss": 0, b"Pss": 1, b"Private_Clean": 2, b"Private_Dirty": 2}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """One process, bytes. ``rss`` is all that is resident in it; ``pss`` and ``private`` leave the memory service's
    pages out; ``service`` are those pages of it that this process has mapped and touched, by what they are."""

    rss: int
    pss: int
    private: int
    """What would be free without it."""
    service: dict[str, int]


def sizes(smaps: bytes) -> Sizes:
    """From ``/proc/PID/smaps``."""
    rss, own, service = 0, [0, 0, 0], dict[str, int]()
    kind: str | None = None
    for line in smaps.splitlines():
        name, colon, rest = line.partition(b":")
        at = _FIELDS.get(name) if colon else None
        if at is not None:
            size = int(rest.split()[0]) * 1024
            if at == 0:
                rss += size
            if kind is None:
                own[at] += size
            elif at == 0:
                service[kind] = service.get(kind, 0) + size
        elif b"-" in line.partition(b" ")[0]:  # "7f12-7f34 rw-s ... /memfd:gms:kv (deleted)" begins a mapping
            _, found, tag = line.partition(_SERVICE)
            kind = tag.partition(b" ")[0].decode(errors="replace") if found else None
    return Sizes(rss=rss, pss=own[1], private=own[2], service=service)


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a pod. ``sizes`` None: it is gone, or not ours to see."""

    name: str
    role: str
    """``supervisor``, ``memory service``, ``keeper``, ``rank`` (a further one of an engine), or the engine's role."""
    pid: int
    sizes: Sizes | None


class PodMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. ``service_bytes`` are the memory service's pages by kind of pool, whoever has them mapped; None: it does
    not answer, and the total lacks them. Empty: there is no such service, or it holds nothing."""

    pod: str
    processes: list[ProcessMemory]
    service_bytes: dict[str, int] | None
    processes_bytes: int
    total_bytes: int


class MemoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``hotspare status --memory --json`` prints. Fields are added, never renamed."""

    version: int = VERSION
    run_dir: str
    pods: list[PodMemory]


def pod_memory(pod: str, processes: Iterable[ProcessMemory], service_bytes: Mapping[str, int] | None) -> PodMemory:
    """The account of one pod."""
    listed = list(processes)
    own = sum(process.sizes.pss for process in listed if process.sizes is not None)
    return PodMemory(
        pod=pod,
        processes=listed,
        service_bytes=dict(service_bytes) if service_bytes is not None else None,
        processes_bytes=own,
        total_bytes=own + sum((service_bytes or {}).values()),
    )


def standing_cost(pod: PodMemory, *, role: str) -> dict[str, int]:
    """What each engine of a role keeps from others while it waits: its own memory, its ranks' and its keeper's,
    by its name. Without the engine its keeper would not be there either."""
    names = [process.name for process in pod.processes if process.role == role]
    return {
        name: sum(
            process.sizes.pss
            for process in pod.processes
            if process.name == name and process.role in (role, RANK, KEEPER) and process.sizes is not None
        )
        for name in names
    }
