"""A whole run: for each arm two workers and their gateway, load, a kill, and what came of it.

    load ──settle──► SIGKILL of the first worker's active engine ──observe──► load ends, answers are waited for

Every moment is ``time.monotonic()`` of the process that saw it, which on Linux is one clock for the whole machine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from app.cli.bench.failover.figures import Seen, summarise
from app.cli.bench.failover.load import OpenLoad, request_id
from app.cli.bench.failover.scale import PODS, Plan, environment
from app.cli.bench.failover.watching import LOOK_SECONDS, Watch
from app.cli.bench.pods import engines_of, model_of
from app.cli.bench.recovery.arms import ARMS, Arm
from app.cli.bench.system import BenchError, System, running_system
from app.cli.bench.together import together
from app.cli.run_dir import read_pods
from workers.contract import Role
from workers.state import EngineState

ORDER: Final = ("cold", "shadow", "shadow_carry")
VICTIM: Final = "pod-0"
READY_SECONDS: Final = 900.0
MARGIN_SECONDS: Final = 300.0
"""How much longer than the observation an answer may take, and a start."""
POLL_SECONDS: Final = 0.05

Say = Callable[[str], None]


async def measure(plan: Plan, arms: Sequence[str], say: Say) -> dict[str, Any]:
    """Run the arms of these names and return the report (``figures.summarise``). One that did not come up, or whose
    worker did not come back while it was observed, is among ``broken``.

    Raises:
        BenchError: that is so of all of them.
    """
    seen: list[Seen] = []
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="hotspare-failover-") as folder:
        for name in arms:
            arm = ARMS[name]
            say(f"{name}: starting ({arm.meaning})")
            try:
                seen.append(await _run_arm(plan, arm, Path(folder) / name, say))
            except (BenchError, TimeoutError) as error:
                broken[name] = str(error) or "it took too long"
                say(f"{name}: given up: {broken[name]}")
    if not seen:
        raise BenchError("; ".join(f"{name}: {why}" for name, why in broken.items()))
    return summarise(plan, seen, broken)


async def _run_arm(plan: Plan, arm: Arm, run_dir: Path, say: Say) -> Seen:
    load_before = os.getloadavg()[0]
    env = {**environment(plan), **dict(arm.env)}
    flags = ["--engine", plan.engine, "--pods", str(PODS), *arm.flags]
    async with running_system(run_dir, flags=flags, env=env, timeout_seconds=READY_SECONDS) as system:
        model = await system.until(
            lambda: model_of(run_dir, PODS), saying="all engines are there", timeout_seconds=READY_SECONDS
        )
        experiment = _Experiment(plan, arm, system, run_dir, model, say)
        async with together() as group:
            watching = group.create_task(system.run_on())
            seen = await experiment.run()
            watching.cancel()
    _read_log(run_dir, seen)  # it is whole now
    seen.load_average = (round(load_before, 2), round(os.getloadavg()[0], 2))
    return seen


class _Experiment:
    """One arm's, over a system that is up."""

    def __init__(self, plan: Plan, arm: Arm, system: System, run_dir: Path, model: str, say: Say) -> None:
        self._plan, self._arm, self._system, self._run_dir, self._say = plan, arm, system, run_dir, say
        observe = plan.seconds(plan.observe_seconds)
        self._watch = Watch(system, run_dir, every=min(LOOK_SECONDS, observe / 100), accelerator=plan.model is not None)
        self._load = OpenLoad(
            f"{system.gateway_url}/v1/completions",
            model,
            headers=system.headers,
            period=1 / (plan.requests_per_second * plan.speed),
            prompt_tokens=plan.tokens(plan.prompt_tokens),
            answer_tokens=plan.tokens(plan.answer_tokens),
        )

    async def run(self) -> Seen:
        plan, load = self._plan, self._load
        async with together() as group:
            watching = group.create_task(self._watch.run())
            began = time.monotonic()
            settle, observe = plan.seconds(plan.settle_seconds), plan.seconds(plan.observe_seconds)
            async with load.running(patience=observe + MARGIN_SECONDS):
                await asyncio.sleep(settle)
                victim = await self._active()
                killed = await self._system.kill(victim.pid)
                seen = Seen(
                    arm=self._arm.name,
                    meaning=self._arm.meaning,
                    began=began,
                    killed=killed,
                    victim=VICTIM,
                    ended=killed + observe,
                    interrupted=victim.inflight,
                )
                self._say(f"{self._arm.name}: killed engine {victim.engine} with {victim.inflight} requests")
                back = group.create_task(self._come_back(victim, seen))
                await asyncio.sleep(seen.ended - time.monotonic())
                load.end()
                async with asyncio.timeout(MARGIN_SECONDS):
                    await back
            watching.cancel()
            await self._watch.look()
        seen.records, seen.samples, seen.lives = load.records, self._watch.samples, self._watch.lives
        lost = sum(record.lost for record in seen.records)
        self._say(f"{self._arm.name}: {len(seen.records)} requests, {lost} lost")
        return seen

    async def _active(self) -> EngineState:
        for state in await self._states():
            if state.role is Role.ACTIVE:
                return state
        raise BenchError(f"{VICTIM} has no active engine to kill")

    async def _states(self) -> list[EngineState]:
        for pod in read_pods(self._run_dir):
            if pod.pod == VICTIM:
                return await engines_of(pod)
        return []

    async def _come_back(self, victim: EngineState, seen: Seen) -> None:
        """Until the worker is routable again, and has a spare if it had one."""
        while seen.routable is None:
            await asyncio.sleep(POLL_SECONDS)
            status = await self._system.get(f"{self._system.gateway_url}/status")
            for worker in status.get("workers", ()):
                if worker["worker"] == VICTIM:
                    seen.detected, seen.routable = _moments(worker["history"], victim.epoch, seen.killed)
        after = self._plan.real_seconds(seen.routable - seen.killed)
        self._say(f"{self._arm.name}: {VICTIM} is routable again after {after:.3g} s")
        while self._arm.spare and seen.spare is None:
            await asyncio.sleep(POLL_SECONDS)
            for state in await self._states():
                if state.role is Role.STANDBY and state.since > seen.killed:
                    seen.spare = state.since


def _moments(history: list[dict[str, Any]], epoch: int, killed: float) -> tuple[float | None, float | None]:
    """When the gateway noticed the death of the engine of this epoch, with the next one at the latest, and when it
    routed to that."""
    later = [entry for entry in history if entry["monotonic"] >= killed]
    noticed = [entry["monotonic"] for entry in later if entry["state"] != "UP"]
    up = [entry["monotonic"] for entry in later if entry["state"] == "UP" and entry["epoch"] != epoch]
    return min((*noticed, *up), default=None), min(up, default=None)


def _read_log(run_dir: Path, seen: Seen) -> None:
    """What the gateway's access log says of how each request went."""
    records = {request_id(record.number): record for record in seen.records}
    for raw in (run_dir / "logs" / "gateway.log").read_bytes().splitlines():
        try:
            line = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            continue  # a line of another process's, or one that is being written
        record = records.get(line.get("request_id", "")) if isinstance(line, dict) else None
        if record is not None:
            record.resumes, record.retries = line.get("resumes", 0), line.get("retries", 0)
