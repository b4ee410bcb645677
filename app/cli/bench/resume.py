"""What a client sees of a kill: ``hotspare bench resume``.

One pod, one stream: a prompt of 64 tokens, and at most 32 of its answer delivered when the active engine gets its
SIGKILL (a few more from kill to kill). The pause is the longest silence of the stream from then on. It holds the
engine's teardown, until its lock is free; a prefill at the other engine of what no full block of the KV cache holds, as
long as that of another prompt of that length whose full blocks are cached, too; and what is left: promotion, and the
way to the resumed answer. Every answer is compared with one to the same prompt that nobody disturbs. What other
gateways make of the same kills is in ``peers``.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from app.cli.bench.streaming import ANSWER_TOKENS, Say, Streamed, prompt_of, spread, stream
from app.cli.bench.system import BenchError, System, running_system
from workers.state import EngineState

PROMPT_TOKENS: Final = 64
MOST_DELIVERED: Final = 32
READY_SECONDS: Final = 300.0
REQUEST_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 3.0
"""An engine is active for so long before it is killed: no supervisor takes that for a crash loop."""


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill; seconds."""

    pause: float
    teardown: float
    prefill: float
    delivered: int
    """Events that the client had then."""
    problem: str
    """Why the answer was lost, if it was."""
    wrong: bool


async def measure(
    *,
    engine: str,
    kills: int,
    say: Say,
    peers: Sequence[str] = (),
    peers_dir: Path = Path(".peers"),
    settle_seconds: float = SETTLE_SECONDS,
) -> dict[str, Any]:
    """Kill so often and return the report (see ``summarise``); with peers, also theirs (see ``peers.summarise``).

    Raises:
        BenchError: a system did not come up, or nobody was promoted.
    """
    done: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="hotspare-bench-") as folder:
        async with (
            running_system(
                Path(folder) / "run", flags=["--engine", engine], env={}, timeout_seconds=READY_SECONDS
            ) as system,
            httpx.AsyncClient(
                base_url=system.gateway_url, headers=system.headers, timeout=REQUEST_SECONDS, trust_env=False
            ) as client,
        ):
            for number in range(kills):
                delivered = delivered_at(number, kills)
                done.append(await _kill(system, client, number, delivered=delivered, settle_seconds=settle_seconds))
                say(f"kill {number + 1} of {kills}: {done[-1].problem or f'a pause of {done[-1].pause:.3f} s'}")
        report = summarise(engine, done)
        if peers:
            from app.cli.bench.peers import measure_peers

            report["peers"], report["skipped"] = await measure_peers(
                peers, peers_dir, Path(folder), engine=engine, kills=kills, say=say, settle_seconds=settle_seconds
            )
    return report


class Struck(NamedTuple):
    """A stream whose engine was killed, after the other one is active."""

    got: Streamed
    model: str
    prompt: list[int]
    killed: float
    active: dict[str, Any]
    """The state of the promoted engine."""


async def strike(
    system: System, client: httpx.AsyncClient, number: int, *, delivered: int, settle_seconds: float
) -> Struck:
    """Ask for the answer to the prompt of this number, and kill its engine, which has served for ``settle_seconds``,
    after so many events.

    Raises:
        BenchError: there was nothing to kill, or nobody was promoted.
    """

    async def ready() -> EngineState | None:
        active = await system.pair()
        return active if active is not None and active.role_seconds >= settle_seconds else None

    victim: EngineState = await system.until(
        ready, saying="an active engine and a spare", timeout_seconds=READY_SECONDS
    )
    killed = 0.0

    async def reached(count: int) -> None:
        nonlocal killed
        if count >= delivered and not killed:
            killed = await system.kill(victim.pid)

    model, prompt = victim.models[0], prompt_of(number, PROMPT_TOKENS)
    got = await stream(client, model, prompt, ANSWER_TOKENS, reached)
    if not killed:
        raise BenchError(f"the answer ended before its engine was killed: {got.problem or got.text!r}")

    async def promoted() -> dict[str, Any]:
        state = await system.engine("ACTIVE")
        return state if state and state["epoch"] != victim.epoch else {}

    active = await system.until(promoted, saying="the spare is active", timeout_seconds=READY_SECONDS)
    return Struck(got, model, prompt, killed, active)


def delivered_at(number: int, kills: int) -> int:
    """After how many events the engine is killed, for this one of so many kills."""
    return MOST_DELIVERED * (number + 1) // kills or 1


async def _kill(
    system: System, client: httpx.AsyncClient, number: int, *, delivered: int, settle_seconds: float
) -> Kill:
    struck = await strike(system, client, number, delivered=delivered, settle_seconds=settle_seconds)
    got, killed = struck.got, struck.killed
    undisturbed = await stream(client, struck.model, struck.prompt)
    known = prompt_of(-1 - number, PROMPT_TOKENS + delivered)
    filled = await stream(client, struck.model, known, 1)
    began = time.monotonic()
    other = await stream(client, struck.model, known, 1)  # at least its last token is always computed
    if problem := undisturbed.problem or filled.problem or other.problem:
        raise BenchError(f"an answer that nobody disturbed was not good: {problem}")
    return Kill(
        pause=pause(got.at, killed),
        teardown=struck.active["promotion"]["granted"] - killed,
        prefill=other.at[0] - began,
        delivered=delivered,
        problem=got.problem,
        wrong=not got.problem and got.text != undisturbed.text,
    )


def pause(at: list[float], killed: float) -> float:
    """The longest silence between events of which the later one came after the kill."""
    return max((after - before for before, after in itertools.pairwise(at) if after >= killed), default=0.0)


def summarise(engine: str, kills: list[Kill]) -> dict[str, Any]:
    """The report: ``*_seconds`` as {"median", "max"}, of answers that were not lost."""
    good = [kill for kill in kills if not kill.problem]

    def spread_of(of: Callable[[Kill], float]) -> dict[str, float | None]:
        return spread([of(kill) for kill in good], "median", "max")

    return {
        "engine": engine,
        "kills": len(kills),
        "pause_seconds": spread_of(lambda kill: kill.pause),
        "teardown_seconds": spread_of(lambda kill: kill.teardown),
        "prefill_seconds": spread_of(lambda kill: kill.prefill),
        "rest_seconds": spread_of(lambda kill: kill.pause - kill.teardown - kill.prefill),
        "lost": len(kills) - len(good),
        "wrong": sum(kill.wrong for kill in kills),
        "delivered": [kill.delivered for kill in kills],
        "problems": [kill.problem for kill in kills if kill.problem],
    }
