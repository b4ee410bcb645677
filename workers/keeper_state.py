"""Whether an engine's keeper does its work, by what the kernel shows of it (proc(5)).

A keeper that is stopped, or one that leaves its dead engine unreaped, forks no next one however long it is waited for.
It says nothing to anybody, so that the supervisor has to look.
"""

from __future__ import annotations

from workers.process_state import PROC, STOPPED, TRACED, ZOMBIE, state_of


def why_not_forking(pid: int) -> str | None:
    """What keeps the keeper ``pid`` from forking, a sentence; None: nothing that can be seen. A dead child that is seen
    for one look only is one that it is about to reap."""
    if state_of(pid) in (STOPPED, TRACED):
        return f"its keeper (process {pid}) is stopped"
    try:
        children = (PROC / f"{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None  # gone, which its supervisor hears otherwise
    dead = [child for child in children if state_of(int(child)) == ZOMBIE]
    return f"its keeper (process {pid}) does not see that its engine (process {dead[0]}) is dead" if dead else None
