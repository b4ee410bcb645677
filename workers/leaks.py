"""[P] When an engine holds so much of the machine that it must make room for a new one.

A leak is no death: the engine answers, and will for a while. So it goes in order, and where the pod has no spare it
waits for one, for a while. What is too much of memory is for a setting to say; descriptors have a limit of the system's
and threads none, so those are held against what the engine began with.
"""

from __future__ import annotations

from typing import Final

from workers.usage import Usage

DESCRIPTORS_SHARE: Final = 0.9
MORE_THREADS: Final = 256
"""Beyond those of the first look. Engines start some when they are used first, tens and not hundreds."""
LOOKS: Final = 3
"""So many looks in a row must find the same: a large request is no leak."""
WAIT_FOR_SPARE_SECONDS: Final = 60.0

_MIB: Final = 1024 * 1024


class LeakWatch:
    """Watches one process. ``limit_bytes`` of private memory; 0: no limit."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._threads: int | None = None
        self._looks = 0
        self._since = 0.0

    def excess(self, usage: Usage) -> str | None:
        """What is too much now, a sentence, or None."""
        if self._threads is None:
            self._threads = usage.threads
        if self._limit_bytes and usage.private_bytes > self._limit_bytes:
            return (
                f"it has {usage.private_bytes / _MIB:,.0f} MiB of private memory, and its limit "
                f"(HOTSPARE_PRIVATE_MEMORY_LIMIT_BYTES) is {self._limit_bytes / _MIB:,.0f} MiB"
            )
        if usage.max_descriptors is not None and usage.descriptors > DESCRIPTORS_SHARE * usage.max_descriptors:
            return f"it has {usage.descriptors} open descriptors of at most {usage.max_descriptors}"
        if usage.threads > self._threads + MORE_THREADS:
            return f"it has {usage.threads} threads, and had {self._threads}"
        return None

    def observe(self, usage: Usage, *, spare: bool, now: float) -> str | None:
        """Why the engine must be replaced now, a sentence, or None. ``spare``: whether the pod has one."""
        problem = self.excess(usage)
        if problem is None:
            self._looks = 0
            return None
        if not self._looks:
            self._since = now
        self._looks += 1
        if self._looks < LOOKS or not (spare or now - self._since > WAIT_FOR_SPARE_SECONDS):
            return None
        return problem
