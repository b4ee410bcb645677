"""A whole run: two pods and their gateway, load, kills, and what came of it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from app.cli.bench import simulated
from app.cli.bench.chaos.answers import SimAnswers
from app.cli.bench.chaos.clients import Listener, Load
from app.cli.bench.chaos.figures import report
from app.cli.bench.chaos.learned import LearnedAnswers
from app.cli.bench.chaos.plan import ROUTES, Kill, Manner, Question, kills, questions
from app.cli.bench.pods import model_of
from app.cli.bench.system import BenchError, System, running_system
from app.cli.bench.together import together
from app.cli.errors import CliError
from app.cli.fault import inject

PODS: Final = 2
READY_SECONDS: Final = 300.0
PAUSE_SECONDS: Final = {"sim": 0.05, "vllm": 0.3}
"""The shortest silence of a stream that is noted: a few times what a token takes (two cores, other streams beside)."""
LATENESS_SECONDS: Final = 0.02
RETRY_SECONDS: Final = 0.05
VLLM_TOKENS: Final = 24

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do."""

    engine: str
    seed: int
    seconds: float
    kill_every: float
    streams: int


class Killer:
    """Does the planned kills. ``done``: (moment, kind)."""

    def __init__(self, run_dir: Path, planned: list[Kill], say: Say) -> None:
        self._run_dir = run_dir
        self._planned = planned
        self._say = say
        self.done: list[tuple[float, str]] = []
        self.skipped = 0

    async def run(self, *, began: float, every: float) -> None:
        """All of them, each at its time."""
        for kill in self._planned:
            await asyncio.sleep(max(0.0, began + kill.at - time.monotonic()))
            await self._do(kill, until=began + kill.at + every / 2)

    async def _do(self, kill: Kill, *, until: float) -> None:
        """Kill whoever of the pods has the role; if nobody has it yet, a little later, and then not at all."""
        while True:
            for pod in kill.pods:
                try:
                    told = await asyncio.to_thread(inject, kill.fault, pod, self._run_dir)
                except CliError:
                    continue
                self.done.append((time.monotonic(), kill.fault.value))
                self._say(told)
                return
            if time.monotonic() > until:
                self.skipped += 1
                return
            await asyncio.sleep(RETRY_SECONDS)


async def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Run it and return the report (``figures.report``).

    Raises:
        BenchError: the system did not come up, or ended.
    """
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # sessions that break are counted, not logged
    with tempfile.TemporaryDirectory(prefix="hotspare-chaos-") as folder:
        run_dir = Path(folder) / "run"
        say(f"chaos: seed {plan.seed}, starting {PODS} pods")
        async with running_system(
            run_dir,
            flags=["--engine", plan.engine, "--pods", str(PODS)],
            env=simulated.settings(),
            timeout_seconds=READY_SECONDS,
        ) as system:
            model = await system.until(
                lambda: model_of(run_dir, PODS), saying="each pod has a spare", timeout_seconds=READY_SECONDS
            )
            answers = _answers(plan, model)
            load = Load(
                system.gateway_url,
                headers=system.headers,
                model=model,
                answers=answers,
                texts=answers if isinstance(answers, SimAnswers) else None,
                pause_seconds=PAUSE_SECONDS[plan.engine],
            )
            async with load.ready():
                asked = await _asked(plan, load, answers)
                return await _under_load(plan, system, run_dir, load, asked, say)


async def _under_load(
    plan: Plan, system: System, run_dir: Path, load: Load, asked: list[Iterator[Question]], say: Say
) -> dict[str, Any]:
    planned = kills(seed=plan.seed, seconds=plan.seconds, every=plan.kill_every, pods=PODS)
    killer = Killer(run_dir, planned, say)
    say(f"chaos: {plan.streams} clients, {len(planned)} kills in {plan.seconds:g} s")
    late: list[float] = []
    began = time.monotonic()
    async with together() as group:
        watching = [group.create_task(system.run_on()), group.create_task(_note_lateness(late))]
        working = [group.create_task(load.client(number, what)) for number, what in enumerate(asked)]
        working.append(group.create_task(killer.run(began=began, every=plan.kill_every)))
        await asyncio.sleep(plan.seconds)
        load.end()
        await asyncio.wait(working)
        for task in watching:
            task.cancel()
    seconds = round(time.monotonic() - began, 1)
    done = {**msgspec.to_builtins(plan), "took_seconds": seconds}
    return report(load.outcomes, killer.done, skipped=killer.skipped, late=late, plan=done)


async def _note_lateness(late: list[float]) -> None:
    """By how much a timer is late, again and again."""
    while True:
        due = time.monotonic() + LATENESS_SECONDS
        await asyncio.sleep(LATENESS_SECONDS)
        late.append(max(0.0, time.monotonic() - due))


def _answers(plan: Plan, model: str) -> SimAnswers | LearnedAnswers:
    if plan.engine == "sim":
        return simulated.answers(model)
    return LearnedAnswers(model=model)


async def _asked(plan: Plan, load: Load, answers: SimAnswers | LearnedAnswers) -> list[Iterator[Question]]:
    """What each client asks; answers that cannot be computed are learned first."""
    numbers = range(plan.streams)
    if not isinstance(answers, LearnedAnswers):
        return [questions(seed=plan.seed, client=number) for number in numbers]
    for path in ROUTES:
        question = Question(path=path, manner=Manner.WHOLE, prompts=(_PROMPT,), tokens=VLLM_TOKENS)
        got = await load.ask(question, answers.body(question), Listener(load.pause_seconds))
        if not answers.learn(question, got):
            raise BenchError(f"there is no answer at {path} to begin with: {got.status} {got.body[:300]!r}")
    return [_few_questions(plan.seed, number) for number in numbers]


_PROMPT: Final = "Tell me a story about a river and a bridge."


def _few_questions(seed: int, client: int) -> Iterator[Question]:
    """The same manners and routes, but only the prompt whose answers are known."""
    for question in questions(seed=seed, client=client):
        if question.manner is not Manner.REALTIME:
            yield msgspec.structs.replace(question, prompts=(_PROMPT,), tokens=VLLM_TOKENS, stop=False)
