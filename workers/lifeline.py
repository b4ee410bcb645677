"""Dying with one's parent, so that a SIGKILL anywhere leaves no orphan.

``PR_SET_PDEATHSIG`` has two traps, both handled here: the kernel forgets it over a fork, so every child asks for
itself; and the parent may be gone before the child asks, so the child compares ``getppid()`` afterwards. The signal
follows the *thread* that forked (prctl(2)): parents fork from their main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class ParentGone(Exception):
    """The parent died before its child could tie itself to it."""


def die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel SIGKILL this process when its parent, ``parent_pid``, dies. ``None``: do nothing.

    Raises:
        ParentGone: the parent is not ``parent_pid`` any more; the caller should exit.
        OSError: the kernel refuses.
    """
    if parent_pid is None:
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise ParentGone(f"the parent process {parent_pid} is gone")


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """While inside, a descendant whose parent dies becomes this process's child, and not init's: it can be found, and
    must be reaped. Not inherited by forks.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")
