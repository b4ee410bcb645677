"""Looks at both workers all the time: how many requests each has, and what its simulated accelerator does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from app.cli.bench.failover.figures import Life, Sample
from app.cli.bench.pods import engines_of
from app.cli.bench.system import System
from app.cli.run_dir import read_pods
from workers.contract import Role
from workers.hosts import authority
from workers.pod_files import PodRecord

LOOK_SECONDS: Final = 0.5
"""Of the run; at most a hundredth of what is observed."""
_COUNTS: Final = tuple(name for name in Life.__struct_fields__ if name not in ("worker", "epoch"))


class Watch:
    """``samples`` and ``lives`` grow while :meth:`run` does."""

    def __init__(self, system: System, run_dir: Path, *, every: float, accelerator: bool) -> None:
        self._system = system
        self._run_dir = run_dir
        self._every = every
        self._accelerator = accelerator
        self.samples: list[Sample] = []
        self._lives: dict[tuple[str, int], Life] = {}

    @property
    def lives(self) -> list[Life]:
        """As they were seen last."""
        return list(self._lives.values())

    async def run(self) -> None:
        """For ever."""
        due = time.monotonic()
        while True:
            await self.look()
            due = max(due + self._every, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def look(self) -> None:
        """Once, at all workers."""
        await asyncio.gather(*(self._look_at(pod) for pod in read_pods(self._run_dir)))

    async def _look_at(self, pod: PodRecord) -> None:
        states = await engines_of(pod)
        now = time.monotonic()
        active = next((state for state in states if state.role is Role.ACTIVE), None)
        work: dict[str, Any] = {}
        if active is not None and self._accelerator:
            url = f"http://{authority(pod.host, pod.serving_port)}/accelerator"
            work = await self._system.get_from_worker(url)
        if "epoch" in work:
            counts = {name: work[name] for name in _COUNTS}
            self._lives[pod.pod, work["epoch"]] = Life(worker=pod.pod, epoch=work["epoch"], **counts)
        inflight = active.inflight if active is not None else 0
        self.samples.append(Sample(at=now, worker=pod.pod, inflight=inflight, waiting=work.get("waiting")))
