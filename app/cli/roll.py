"""``hotspare handover --restart-keepers``: a pod's engines, one after the other, by others of the code installed now.

A keeper forks engines of the code that it has imported. So it is the keeper that must go, and the pod's supervisor
starts another one, from what is installed then. The spares first, each told to stop and awaited as a spare again; then
the active engine hands over to one of them, and its own keeper goes last. If a new one does not become a spare, the
active engine, of the old code, serves on, and nothing else is touched.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

from app.cli.handover import Say, ask_to_hand_over, cannot, pod_key
from app.cli.observe import ask_engine, ask_pod
from app.cli.run_dir import find_pod
from workers.contract import Role
from workers.handover import Asked
from workers.pod_files import PodRecord
from workers.state import EngineState

START_SECONDS: Final = 600.0
"""As long as a supervisor waits for an engine (``startup_timeout_seconds``)."""
LOOK_SECONDS: Final = 0.1


def roll(
    pod_name: str | None,
    run_dir: Path,
    asked: Asked,
    *,
    say: Say,
    progress: Say,
    start_seconds: float = START_SECONDS,
) -> None:
    """Do it, handing over as ``asked``; ``say`` gets a sentence of each step, ``progress`` what one waits for.

    Raises:
        CliError: it came to a stop; the message says where, and who serves.
    """
    asyncio.run(_Roll(pod_name, run_dir, asked, say, progress, start_seconds).run())


class _Roll:
    def __init__(
        self, pod_name: str | None, run_dir: Path, asked: Asked, say: Say, progress: Say, start_seconds: float
    ) -> None:
        self._name = pod_name
        self._run_dir = run_dir
        self._asked = asked
        self._say = say
        self._progress = progress
        self._start_seconds = start_seconds

    async def run(self) -> None:
        pod = find_pod(self._name, self._run_dir)
        if pod.pid is None:
            raise cannot(
                f"{pod.pod} has no supervisor that would start its engines again: in Kubernetes a new version is a new "
                "image, and the StatefulSet's rolling update brings it; nothing was done"
            )
        key = pod_key(pod, self._run_dir)
        before = {name: record.pid for name, record in pod.engines.items()}
        states = {name: state for name, state in (await ask_pod(pod)).items() if isinstance(state, EngineState)}
        active = [name for name, state in states.items() if state.role is Role.ACTIVE]
        spares = [name for name, state in states.items() if state.spare]
        if len(active) != 1 or len(spares) != len(before) - 1 or not spares:
            seen = ", ".join(f"{name} is {states[name].role if name in states else 'silent'}" for name in before)
            raise cannot(
                f"{pod.pod} must have an active engine, at least one spare, and no other ({seen}); nothing was done"
            )
        for name in spares:
            await self._restart(name, before[name])
        self._say(await ask_to_hand_over(pod, key, self._asked, progress=self._progress))
        await self._restart(active[0], before[active[0]])

    async def _restart(self, name: str, old: int | None) -> None:
        """Have the supervisor start this engine's process anew, and wait until there is a spare of it."""
        began = time.monotonic()
        pod = find_pod(self._name, self._run_dir)
        if old is not None and pod.engines[name].pid == old:  # without a keeper a hand-over has ended it already
            _terminate(old, pod)
        while not await self._is_anew(name, old):
            if time.monotonic() - began > self._start_seconds:
                raise cannot(
                    f"engine {name} of {self._name} is no spare {self._start_seconds:g} s after it was to start anew; "
                    "its log says why. `hotspare status` shows who serves"
                )
            await asyncio.sleep(LOOK_SECONDS)
        self._say(f"{self._name}: engine {name} is new, and a spare after {time.monotonic() - began:.1f} s")

    async def _is_anew(self, name: str, old: int | None) -> bool:
        pod = find_pod(self._name, self._run_dir)
        pid = pod.engines[name].pid
        if pid is None or pid == old:
            return False
        state = await ask_engine(pod, name)
        return isinstance(state, EngineState) and pid in (state.keeper_pid, state.pid) and state.spare


def _terminate(pid: int, pod: PodRecord) -> None:
    """SIGTERM, if the process behind the pid is one that the pod's supervisor has started."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _parent(pid) == pod.pid:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise cannot(f"process {pid} of {pod.pod} belongs to another user; it goes on as it was") from None
    finally:
        os.close(pidfd)


def _parent(pid: int) -> int:
    """The pid of its parent, 0 if it is gone (proc(5), stat: what stands in parentheses may be anything)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
