"""Not outliving the process that started this one, even if that one is killed with SIGKILL."""

from __future__ import annotations

import os
import signal

from gms import libc


def die_with(parent_pid: int) -> bool:
    """Asks the kernel for a SIGKILL when the parent's thread that forked this process ends. False if `parent_pid` is
    not (any more) the parent: it died before the kernel was asked, and the caller should exit."""
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid
