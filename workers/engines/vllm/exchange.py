"""The memory in which the ranks of an engine exchange what they compute: vLLM's segments in /dev/shm, and their names.

vLLM takes the last part of the rendezvous file's path into the names, and leaves them there if it is killed. So that
part is one of our own, each life's another; the names are taken away as soon as every rank has mapped the segments, and
a life begins with removing what one has left that was killed before that moment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where shm_open(3) keeps its segments


def prefix(runtime_dir: Path) -> str:
    """How the names of an engine's segments begin, in every life of it. An engine has its runtime folder for itself,
    and nobody else a folder of that path."""
    return f"hotspare-{blake2b(str(runtime_dir.absolute()).encode(), digest_size=8).hexdigest()}-"


def names(begin: str) -> list[str]:
    """What is there under a name that begins so."""
    return [name for name in os.listdir(SHARED_MEMORY) if name.startswith(begin)]


def forget(begin: str) -> None:
    """Take the names away. Ranks that have mapped the segments keep them, and these go with the last of them."""
    for name in names(begin):
        with suppress(FileNotFoundError):
            (SHARED_MEMORY / name).unlink()
