"""What is known of an engine that does not answer: what it has written down, and what the kernel says of its process.

A stopped engine has a pid and its memory, and whoever wants to know why it is silent needs the one and pays for the
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from workers import ledger
from workers.pod_files import METRICS_SUFFIX, PodRecord


class AbsentEngine(NamedTuple):
    """``pid`` None: there is no such process now. ``keeper_pid`` None: there is no keeper, or it is gone."""

    pid: int | None
    keeper_pid: int | None
    restarts: int


def look(pod: PodRecord, engine: str, run_dir: Path) -> AbsentEngine:
    """One engine of a pod. A process counts as the engine's only while it is the pod's, or a child of its keeper."""
    record = pod.engines[engine]
    path = run_dir / pod.pod / f"engine-{engine}{METRICS_SUFFIX}"
    written = ledger.read(path, instance=pod.instance)
    restarts = max(record.restarts, int(written.get(ledger.LIVES, 0)) - 1)
    pid = int(written.get(ledger.PID, 0))
    if record.pid is None:
        return AbsentEngine(None, None, restarts)
    if pid == record.pid:
        return AbsentEngine(pid, None, restarts)
    return AbsentEngine(pid if pid and parent(pid) == record.pid else None, record.pid, restarts)


def is_child(pid: int | None, *, of: int | None) -> bool:
    return pid is not None and of is not None and parent(pid) == of


def parent(pid: int) -> int | None:
    """None: it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])
