"""What this process holds of the machine, read from the kernel: cheap enough for every look."""

from __future__ import annotations

import os
import resource

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """``private_bytes`` are anonymous pages, swapped ones included: the memory service's pages, which all engines of a
    pod share, are none of them. ``max_descriptors`` None: no limit."""

    private_bytes: int
    threads: int
    descriptors: int
    max_descriptors: int | None


def read_usage() -> Usage:
    """Of this process, now."""
    fields: dict[bytes, bytes] = {}
    with open("/proc/self/status", "rb") as status:
        for line in status:
            name, _, value = line.partition(b":")
            fields[name] = value
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Usage(
        private_bytes=1024 * sum(int(fields.get(name, b"0").split()[0]) for name in (b"RssAnon", b"VmSwap")),
        threads=int(fields[b"Threads"]),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # the one that lists them
        max_descriptors=None if soft == resource.RLIM_INFINITY else soft,
    )
