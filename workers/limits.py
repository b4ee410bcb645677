"""Whether this process may open as many files as it needs: told before it runs into that, and in one sentence."""

from __future__ import annotations

import resource
from typing import Final

POD_FILES: Final = 64
"""The supervisor: some for itself, and three for each process of its pod."""
ENGINE_FILES: Final = 128
"""A keeper and its engine: an idle sim engine has some 30, and each request takes one more; vLLM has more of both."""


def too_few_files(needed: int) -> str:
    """A sentence, or nothing if there are enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    where = "ulimit -n" if hard == resource.RLIM_INFINITY or hard >= needed else "the hard limit, ulimit -Hn"
    return f"this process may open {soft} files at a time and needs {needed}; raise the limit ({where})"
