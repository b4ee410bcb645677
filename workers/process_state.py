"""What the kernel shows of a process (proc(5)): whether it runs at all, and who started it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC = Path("/proc")
STOPPED: Final = "T"
TRACED: Final = "t"
"""Stopped by a debugger."""
ZOMBIE: Final = "Z"


def state_of(pid: int) -> str:
    """One letter; empty if there is no such process."""
    return _stat(pid)[0]


def is_stopped(pid: int) -> bool:
    """Whether it does not run because of SIGSTOP or the like: no signal but SIGKILL and SIGCONT reaches it."""
    return state_of(pid) == STOPPED


def parent_of(pid: int) -> int:
    """0 if there is no such process."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> tuple[str, str]:
    try:  # what stands in parentheses may be anything
        state, parent, *_ = (PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return "", "0"
    return state, parent
