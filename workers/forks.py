"""Descriptors that a fork must not keep.

A forked child shares the parent's open files, and what must be gone with the parent stays as long as the child lives: a
lock stays held, a port stays bound. Exec is no problem (everything is opened with ``O_CLOEXEC``); a bare fork is.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Closable(Protocol):
    def close(self) -> object:
        """Give the descriptor back; closing twice is fine."""


def close_in_forks(owner: Closable) -> None:
    """Close ``owner`` in every child that this process forks from now on, as long as ``owner`` exists."""
    reference = weakref.ref(owner)

    def close() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close)
