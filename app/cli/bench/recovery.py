"""How long a killed engine is missed, with a shadow and without one: ``hotspare bench recovery``.

Two arms, the same engine and settings, one after the other: *shadow* (a pair of engines over the memory service) and
*cold* (one engine, no keeper, no memory service: started again from disk). In each a small request goes through the
gateway every 20 ms while the active engine is SIGKILLed, five times. Nothing is estimated: every moment is
``time.monotonic()`` of the process that saw it, which on Linux is one clock for the whole machine.

    SIGKILL ──teardown──► lock free ──promote──► routable in the gateway ──first token──► first answer
    └──────────────────────────────── recovery ───────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from app.cli.bench.load import SteadyLoad
from app.cli.bench.system import BenchError, System, running_system
from app.cli.observe import private_bytes

PERIOD_SECONDS: Final = 0.02
MOST_OUTSTANDING: Final = 8
WAIT_FOR_WORKER_SECONDS: Final = 120
READY_SECONDS: Final = 300.0
SETTLE_REQUESTS: Final = 50
SETTLE_SECONDS: Final = 3.0
"""Successes, and time as the active engine, before each kill: the load is steady then, the engine warm, and no
supervisor takes the kill for a crash loop and waits before it starts the engine again."""

ARMS: Final = {"shadow": (), "cold": ("--shadows", "0", "--no-gms", "--no-keeper")}

Say = Callable[[str], None]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One kill. Seconds; what an arm does not have is None."""

    recovery: float
    teardown: float | None = None
    detect: float | None = None
    promote: float | None = None
    first_token: float | None = None
    redundancy: float | None = None
    parked_private_mib: float | None = None
    weights_copies: float | None = None


class Arm(msgspec.Struct, kw_only=True):
    """All rounds of one arm, and how many of its requests got no good answer."""

    rounds: list[Round]
    failed_requests: int
    requests: int
    problems: list[str]


async def measure(*, engine: str, rounds: int, say: Say) -> dict[str, Any]:
    """Run both arms and return the report (see ``summarise``).

    Raises:
        BenchError: a system did not come up, or a kill was not recovered from.
    """
    arms: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory(prefix="hotspare-bench-") as folder:
        for name, flags in ARMS.items():
            say(f"{name}: starting")
            env = {"HOTSPARE_WAIT_FOR_WORKER_SECONDS": str(WAIT_FOR_WORKER_SECONDS)}
            async with running_system(
                Path(folder) / name, flags=["--engine", engine, *flags], env=env, timeout_seconds=READY_SECONDS
            ) as system:
                arms[name] = await _run_arm(name, system, rounds=rounds, say=say)
    return summarise(engine, arms["shadow"], arms["cold"])


async def _run_arm(name: str, system: System, *, rounds: int, say: Say) -> Arm:
    load = SteadyLoad(
        f"{system.gateway_url}/v1/completions",
        {"model": await _model(system), "prompt": [42], "max_tokens": 1, "temperature": 0},
        headers=system.headers,
        period_seconds=PERIOD_SECONDS,
        most_outstanding=MOST_OUTSTANDING,
    )
    done: list[Round] = []
    async with load.running():
        for number in range(1, rounds + 1):
            done.append(await (_shadow_round if name == "shadow" else _cold_round)(system, load))
            say(f"{name}: round {number} of {rounds}: answered again after {done[-1].recovery:.3f} s")
    failed = [answer for answer in load.answers if answer.failed]
    problems = sorted({f"{answer.status}: {answer.problem}" for answer in failed})
    return Arm(rounds=done, failed_requests=len(failed), requests=len(load.answers), problems=problems[:10])


async def _model(system: System) -> str:
    active = await system.engine("ACTIVE")
    return str(active["models"][0])


async def _shadow_round(system: System, load: SteadyLoad) -> Round:
    parked = await system.until(
        lambda: system.engine("STANDBY"), saying="a shadow is parked", timeout_seconds=READY_SECONDS
    )
    private = await asyncio.to_thread(private_bytes, parked["pid"])
    engines = await system.engines()
    copies = sum(state["memory"]["weights_outside_gms_bytes"] for state in engines)
    weights = engines[0]["memory"]["weights_bytes"]
    victim, killed, eof = await _settle_and_kill(system, load, watch=True)

    async def promoted() -> dict[str, Any]:
        state = await system.engine("ACTIVE")
        return state if state and state["epoch"] != victim["epoch"] else {}

    active = await system.until(promoted, saying="the shadow is active", timeout_seconds=READY_SECONDS)
    promotion = active["promotion"]
    first = await load.wait_for_answer_after(promotion["bound"], timeout_seconds=READY_SECONDS)
    history = await system.history()
    suspect = _moment(history, "SUSPECT", victim["epoch"])
    routable = _moment(history, "UP", active["epoch"])
    spare = await system.until(
        lambda: system.engine("STANDBY"), saying="redundancy is restored", timeout_seconds=READY_SECONDS
    )
    return Round(
        recovery=first.done - killed,
        teardown=promotion["granted"] - killed,
        detect=suspect - eof,
        promote=routable - promotion["granted"],
        first_token=first.done - routable,
        redundancy=spare["monotonic"] - spare["role_seconds"] - killed,
        parked_private_mib=(private or 0) / (1 << 20),
        weights_copies=copies / weights,
    )


async def _cold_round(system: System, load: SteadyLoad) -> Round:
    victim, killed, _ = await _settle_and_kill(system, load, watch=False)

    async def restarted() -> dict[str, Any]:
        state = await system.engine("ACTIVE")
        return state if state and state["pid"] != victim["pid"] else {}

    active = await system.until(restarted, saying="the engine is back", timeout_seconds=READY_SECONDS)
    first = await load.wait_for_answer_after(active["promotion"]["bound"], timeout_seconds=READY_SECONDS)
    return Round(recovery=first.done - killed)


async def _settle_and_kill(system: System, load: SteadyLoad, *, watch: bool) -> tuple[dict[str, Any], float, float]:
    """Wait for a steady load, kill the active engine; its state, the moment, and when this process saw its EOF."""
    await load.wait_for_success(count=SETTLE_REQUESTS, timeout_seconds=READY_SECONDS)

    async def settled() -> dict[str, Any]:
        state = await system.engine("ACTIVE")
        return state if state and state["role_seconds"] >= SETTLE_SECONDS else {}

    victim = await system.until(settled, saying="the active engine is settled", timeout_seconds=READY_SECONDS)
    host, port = system.serving
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = "".join(f"{name}: {value}\r\n" for name, value in system.worker_headers.items())
        writer.write(f"GET /internal/watch HTTP/1.1\r\nhost: {host}\r\n{lines}\r\n".encode())
        await reader.readuntil(b"}\n")
        killed = await system.kill(victim["pid"])
        eof = killed
        if watch:
            try:
                while await reader.read(65536):
                    pass
            except ConnectionResetError:
                pass
            eof = time.monotonic()
    finally:
        writer.close()
    return victim, killed, eof


def _moment(history: list[dict[str, Any]], state: str, epoch: int) -> float:
    """When the gateway took the pod's ``epoch`` for ``state``, the first time."""
    for entry in history:
        if entry["state"] == state and entry["epoch"] == epoch:
            return float(entry["monotonic"])
    raise BenchError(f"the gateway's history does not show {state} for epoch {epoch}: {history[-6:]}")


def summarise(engine: str, shadow: Arm, cold: Arm) -> dict[str, Any]:
    """The report: ``*_seconds`` as {"median", "max"}, everything else plain numbers."""

    def spread(arm: Arm, name: str) -> dict[str, float]:
        values = [value for done in arm.rounds if (value := getattr(done, name)) is not None]
        return {"median": round(statistics.median(values), 6), "max": round(max(values), 6)}

    report: dict[str, Any] = {"engine": engine, "rounds": len(shadow.rounds)}
    report["cold_restart_seconds"] = spread(cold, "recovery")
    for name in ("recovery", "teardown", "detect", "promote", "first_token", "redundancy"):
        report[f"{name}_seconds"] = spread(shadow, name)
    report["ratio"] = round(report["cold_restart_seconds"]["median"] / report["recovery_seconds"]["median"], 2)
    report["failed_requests"] = shadow.failed_requests + cold.failed_requests
    report["requests"] = shadow.requests + cold.requests
    report["weights_copies"] = round(max(done.weights_copies or 0.0 for done in shadow.rounds), 6)
    report["parked_private_mib"] = round(max(done.parked_private_mib or 0.0 for done in shadow.rounds), 1)
    report["problems"] = shadow.problems + cold.problems
    return report
