"""What a gateway's process asks of the kernel when it starts."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Collection
from typing import Final

from app.start_error import StartError

_PR_SET_PDEATHSIG = 1
_FIRST: Final = 1
"""The pid of a container's first process: what others there leave behind when they end is its to bury."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens.

    Raises:
        StartError: the parent has gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise StartError(f"cannot ask to die with the parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise StartError(f"the parent process {parent_pid} has ended already")


def raise_file_limit() -> None:
    """A stream has two connections, and the usual limit of 1024 open files would end at 500 of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def have_strays_buried() -> None:
    """By the kernel, if this is the first process of a container. For a process without children of its own: it would
    not see their ends."""
    if os.getpid() == _FIRST:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def bury_strays(own: Collection[int]) -> None:
    """The same for a process with children, ``own``; to be called again and again."""
    if os.getpid() != _FIRST:
        return
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)
