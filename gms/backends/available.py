"""How much memory this process can still have: what the machine has left, and what its cgroups leave of it.

Both kinds of cgroups are looked at, the process's own and those above it. Files in the page cache do not count as used:
the kernel drops them when memory is asked for. What cannot be read, as in a sandbox without /sys, limits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

UNKNOWN: Final = 1 << 62


class Available(NamedTuple):
    """`size_bytes`, and who says so, for people."""

    size_bytes: int
    where: str


class _Kind(NamedTuple):
    limit: str
    usage: str
    cached: tuple[str, str]


_V2: Final = _Kind("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1: Final = _Kind("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> Available:
    """The least of what the machine and each cgroup has left. `mounted` is where cgroups are mounted."""
    return min([_machine(proc), *_cgroups(proc, mounted)], key=lambda found: found.size_bytes)


def _machine(proc: Path) -> Available:
    fields = _fields(proc / "meminfo")
    return Available(fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else UNKNOWN, "this machine")


def _cgroups(proc: Path, mounted: Path) -> Iterator[Available]:
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if (number, controllers) == ("0", ""):
            roots, kind = [mounted, mounted / "unified"], _V2
        elif "memory" in controllers.split(","):
            roots, kind = [mounted / "memory"], _V1
        else:
            continue
        place = PurePosixPath(path.lstrip("/"))
        for root in roots:  # in a container the path may name what lies outside; what is mounted is then its own group
            yield from (found for group in (place, *place.parents) if (found := _left(root / group, kind)))


def _left(group: Path, kind: _Kind) -> Available | None:
    """What a group leaves, or None if it has no limit or cannot be read."""
    limit, usage = _text(group / kind.limit).strip(), _text(group / kind.usage).strip()
    if not (limit.isdecimal() and usage.isdecimal()):  # "max", or nothing
        return None
    statistics = _fields(group / "memory.stat")
    used = int(usage) - sum(statistics.get(name, 0) for name in kind.cached)
    return Available(max(int(limit) - max(used, 0), 0), "this container")


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in _text(path).splitlines())
    return {found[0]: int(found[1]) for found in words if len(found) >= 2 and found[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
