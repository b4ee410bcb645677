"""What a process holds that outlives a call: descriptors, threads, children, files; and what is new of it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - looked at, never written to
_EXECUTORS: Final = ("asyncio_", "uvloop_")
"""Threads of the event loop's own executor, which end with the loop."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """At one moment."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[tuple[int, str]]
    """Python's, those of the loop's executor left out; a library's pool of native ones is the process's."""
    children: frozenset[int]
    temporary: frozenset[str]

    def since(self, before: Held) -> list[str]:
        """What is here and was not before, in words, one each."""
        found = [f"descriptor {what}" for _, what in sorted(self.descriptors - before.descriptors)]
        found += [f"thread {name}" for _, name in sorted(self.threads - before.threads)]
        found += [f"child process {pid}" for pid in sorted(self.children - before.children)]
        found += [f"file {Path(tempfile.gettempdir(), name)}" for name in sorted(self.temporary - before.temporary)]
        return found


def in_words(found: Iterable[str]) -> str:
    """A list for a person, equal ones counted."""
    return ", ".join(what if count == 1 else f"{count} times {what}" for what, count in Counter(found).items())


def look() -> Held:
    return Held(
        descriptors=frozenset(_descriptors()),
        threads=frozenset(
            (thread.ident or 0, thread.name)
            for thread in threading.enumerate()
            if thread.is_alive() and not thread.name.startswith(_EXECUTORS)
        ),
        children=frozenset(children()),
        temporary=frozenset(entry.name for entry in _entries(Path(tempfile.gettempdir()))),
    )


def shared_memory() -> frozenset[str]:
    """Files in /dev/shm that this process or a child of it has open or mapped. Others' come and go there meanwhile, so
    that what is new in the folder says nothing."""
    found: set[str] = set()
    for pid in ("self", *map(str, children())):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found.update(line.partition("/")[2] for line in lines if SHARED_MEMORY.name in line)
            with os.scandir(f"/proc/{pid}/fd") as descriptors:
                found.update(os.readlink(entry.path).removeprefix("/") for entry in descriptors)
        except OSError:  # ended meanwhile, or a descriptor was closed
            continue
    return frozenset(f"/{path}" for path in found if f"/{path}".startswith(f"{SHARED_MEMORY}/"))


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue


def children() -> Iterator[int]:
    """Those of this process, and orphans of theirs if it adopts them."""
    for task in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended meanwhile
            continue


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
