"""The pods of a benchmark: which engines answer, and whether a pod has all that it is to have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.cli.observe import ask_pod
from app.cli.run_dir import read_pods
from workers.contract import Role
from workers.pod_files import PodRecord
from workers.state import EngineState


async def engines_of(pod: PodRecord) -> list[EngineState]:
    """Those that answer."""
    return [answer for answer in (await ask_pod(pod)).values() if isinstance(answer, EngineState)]


async def active_of(pod: PodRecord) -> EngineState | None:
    """The active engine of a complete pod: one with a spare, too, unless it is to have a single engine. Else None."""
    return complete(pod, await engines_of(pod))


def complete(pod: PodRecord, states: Sequence[EngineState]) -> EngineState | None:
    """The same, from what its engines say. Pure."""
    if len(pod.engines) > 1 and all(state.role is not Role.STANDBY for state in states):
        return None
    return next((state for state in states if state.role is Role.ACTIVE), None)


async def model_of(run_dir: Path, count: int) -> str:
    """The model's name, once there are so many pods and all are complete; "" before."""
    pods = read_pods(run_dir)
    model = ""
    for pod in pods:
        if (active := await active_of(pod)) is None:
            return ""
        model = active.models[0]
    return model if len(pods) == count else ""
