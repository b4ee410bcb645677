"""How long a killed engine is missed: ``hotspare bench recovery``.

The arms (``arms``) run one after the other, with the same engine and settings, and each without and with a load of
streamed answers. The active engine is SIGKILLed so often. Nothing is estimated: every moment is ``time.monotonic()`` of
the process that saw it, which on Linux is one clock for the whole machine.

    SIGKILL ─teardown─► lock ─lock─► epoch ─map─► pages ─bind─► port ─routable─► in the gateway ─first token─► answer
    └────────────────────────────────────────── recovery ───────────────────────────────────────────────────────┘

Recovery ends with the first answer to a small request, one of which is asked all the time; under a load of streams,
with the first token that any client gets from the new engine.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from app.cli.bench.load import SteadyLoad
from app.cli.bench.recovery.arms import Arm, chosen
from app.cli.bench.recovery.clients import Clients, body_of
from app.cli.bench.recovery.figures import BEFORE_SECONDS, Done, Round, summarise
from app.cli.bench.recovery.stock import Stock, running_stock
from app.cli.bench.streaming import prompt_of
from app.cli.bench.system import BenchError, System, running_system
from app.cli.observe import private_bytes
from app.cli.variables import KNOWN

PERIOD_SECONDS: Final = 0.02
WAIT_FOR_WORKER_SECONDS: Final = 120
READY_SECONDS: Final = 300.0
SETTLE_REQUESTS: Final = 20
SETTLE_SECONDS: Final = 3.0
"""Successes, and time as the active engine, before each kill: the load is steady then, the engine warm, and no
supervisor takes the kill for a crash loop and waits before it starts the engine again."""
REPEATED_TOKENS: Final = 1000
"""Length of the prompt that is asked for before and after a kill."""
WARM_REPEATS: Final = 3

Say = Callable[[str], None]


class Target(Protocol):
    """What answers, can be killed, and comes back."""

    url: str
    headers: Mapping[str, str]
    model: str

    async def settle(self) -> None:
        """Until it can be killed."""

    async def kill(self) -> float:
        """SIGKILL, and the moment of it."""

    async def back(self) -> float:
        """Until another engine is there that can answer; no answer after the returned moment is the old one's."""

    async def explain(self, first: float) -> dict[str, Any]:
        """Fields of ``Round``, once the first answer came at ``first``."""


class Pod:
    """A gateway and one pod of ours."""

    def __init__(self, system: System, arm: Arm, *, settle_seconds: float) -> None:
        self._system, self._arm, self._settle_seconds = system, arm, settle_seconds
        self.url = f"{system.gateway_url}/v1/completions"
        self.headers: Mapping[str, str] = system.headers
        self.model = ""
        self._victim: dict[str, Any] = {}
        self._active: dict[str, Any] = {}
        self._killed = self._eof = 0.0
        self._before: dict[str, Any] = {}

    async def settle(self) -> None:
        async def settled() -> dict[str, Any]:
            state = await self._system.engine("ACTIVE")
            return state if state and state["role_seconds"] >= self._settle_seconds else {}

        await self._until(settled, "the active engine is settled")
        self._before = {}
        if self._arm.spare:
            parked = await self._until(lambda: self._system.engine("STANDBY"), "a shadow is parked")
            engines = await self._system.engines()
            outside = sum(state["memory"]["weights_outside_gms_bytes"] for state in engines)
            self._before = {
                "parked_private_mib": (await asyncio.to_thread(private_bytes, parked["pid"]) or 0) / (1 << 20),
                "weights_copies": outside / engines[0]["memory"]["weights_bytes"],
            }
        self._victim = await self._system.engine("ACTIVE")
        self.model = str(self._victim["models"][0])

    async def kill(self) -> float:
        host, port = self._system.serving
        reader, writer = await asyncio.open_connection(host, port)
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in self._system.worker_headers.items())
            writer.write(f"GET /internal/watch HTTP/1.1\r\nhost: {host}\r\n{lines}\r\n".encode())
            await reader.readuntil(b"}\n")
            self._killed = await self._system.kill(self._victim["pid"])
            try:
                while await reader.read(65536):
                    pass
            except ConnectionResetError:
                pass
            self._eof = time.monotonic()
        finally:
            writer.close()
        return self._killed

    async def back(self) -> float:
        async def another() -> dict[str, Any]:
            state = await self._system.engine("ACTIVE")
            return state if state and state["pid"] != self._victim["pid"] else {}

        self._active = await self._until(another, "another engine is active")
        return float(self._active["promotion"]["bound"])

    async def explain(self, first: float) -> dict[str, Any]:
        if not self._arm.spare:
            return {}
        promotion, history = self._active["promotion"], await self._system.history()
        routable = _moment(history, "UP", self._active["epoch"])
        spare = await self._until(lambda: self._system.engine("STANDBY"), "there is a shadow again")
        return self._before | {
            "phases": {
                "teardown": promotion["granted"] - self._killed,
                "detect": _moment(history, "SUSPECT", self._victim["epoch"]) - self._eof,
                "lock": promotion["epoch_written"] - promotion["granted"],
                "map": promotion["memory_mapped"] - promotion["epoch_written"],
                "bind": promotion["bound"] - promotion["memory_mapped"],
                "routable": routable - promotion["bound"],
                "first_token": first - routable,
            },
            "promote": routable - promotion["granted"],
            "redundancy": spare["monotonic"] - spare["role_seconds"] - self._killed,
        }

    async def _until(self, what: Callable[[], Any], saying: str) -> dict[str, Any]:
        return dict(await self._system.until(what, saying=saying, timeout_seconds=READY_SECONDS))


class StockServer:
    """vLLM's own server, which the benchmark starts again."""

    headers: Mapping[str, str] = {}

    def __init__(self, stock: Stock, model: str, *, settle_seconds: float) -> None:
        self._stock, self.model, self._settle_seconds = stock, model, settle_seconds
        self.url = f"{stock.url}/v1/completions"
        self._ready_at = time.monotonic()

    async def settle(self) -> None:
        await self._stock.clear_up()
        await asyncio.sleep(self._ready_at + self._settle_seconds - time.monotonic())

    async def kill(self) -> float:
        killed = await self._stock.kill()
        await self._stock.start()
        return killed

    async def back(self) -> float:
        started = time.monotonic()
        await self._stock.until_ready()
        self._ready_at = time.monotonic()
        return started

    async def explain(self, first: float) -> dict[str, Any]:
        return {}


async def measure(
    *,
    engine: str,
    kills: int,
    restarts: int,
    arms: Sequence[str],
    loads: Sequence[str],
    say: Say,
    settle_seconds: float = SETTLE_SECONDS,
) -> dict[str, Any]:
    """Run the arms of these names and return the report (see ``figures.summarise``). An arm with a shadow gets so many
    ``kills``, the others, whose engines take long to come back, so many ``restarts``. An engine has served for
    ``settle_seconds`` before it is killed.

    An arm that did not come up, or was not recovered from a kill, is among ``broken``.

    Raises:
        BenchError: that is so of all of them.
    """
    run, skipped = chosen(arms, engine=engine, known_variables=KNOWN)
    done: list[Done] = []
    broken: dict[str, str] = {}
    for name, why in skipped.items():
        say(f"{name} is left out: {why}")
    with tempfile.TemporaryDirectory(prefix="hotspare-bench-") as folder:
        for arm in run:
            say(f"{arm.name}: starting ({arm.meaning})")
            try:
                async with _running(arm, Path(folder) / arm.name, engine, settle_seconds) as target:
                    for load in loads:
                        rounds = kills if arm.spare else restarts
                        done.append(
                            await _run_arm(arm, load, target, rounds=rounds, settle_seconds=settle_seconds, say=say)
                        )
            except (BenchError, TimeoutError) as error:
                # A whole run takes long: what the other arms have shown, or will, is not to be lost with this one.
                broken[arm.name] = str(error) or f"an answer did not come within {READY_SECONDS:g} s"
                say(f"{arm.name}: given up: {broken[arm.name]}")
    if not done:
        raise BenchError("; ".join(f"{name}: {why}" for name, why in {**skipped, **broken}.items()) or "no arm")
    return summarise(engine, done, skipped, broken)


@asynccontextmanager
async def _running(arm: Arm, folder: Path, engine: str, settle_seconds: float) -> AsyncIterator[Target]:
    if not arm.ours:
        async with running_stock(folder) as (stock, model):
            yield StockServer(stock, model, settle_seconds=settle_seconds)
        return
    env = {"HOTSPARE_WAIT_FOR_WORKER_SECONDS": str(WAIT_FOR_WORKER_SECONDS), **dict(arm.env)}
    async with running_system(
        folder, flags=["--engine", engine, *arm.flags], env=env, timeout_seconds=READY_SECONDS
    ) as system:
        yield Pod(system, arm, settle_seconds=settle_seconds)


async def _run_arm(arm: Arm, load: str, target: Target, *, rounds: int, settle_seconds: float, say: Say) -> Done:
    before = os.getloadavg()[0]
    await target.settle()
    run = partial(_streams, settle_seconds=settle_seconds) if load == "streams" else _small_requests
    done = await run(arm, target, rounds, lambda line: say(f"{arm.name}, load {load}: {line}"))
    done.load_average = (round(before, 2), round(os.getloadavg()[0], 2))
    return done


async def _small_requests(arm: Arm, target: Target, rounds: int, say: Say) -> Done:
    load = SteadyLoad(
        target.url,
        {"model": target.model, "prompt": [42], "max_tokens": 1, "temperature": 0},
        headers=target.headers,
        period_seconds=PERIOD_SECONDS,
        most_outstanding=1,
    )
    done = []
    async with load.running(), httpx.AsyncClient(timeout=READY_SECONDS, trust_env=False) as client:
        for number in range(rounds):
            await load.wait_for_success(count=SETTLE_REQUESTS, timeout_seconds=READY_SECONDS)
            await target.settle()
            prompt = prompt_of(-1 - number, REPEATED_TOKENS)
            await _first_token(client, target, prompt)
            warm = sorted([await _first_token(client, target, prompt) for _ in range(WARM_REPEATS)])
            killed = await target.kill()
            moment = await target.back()
            first = await load.wait_for_answer_after(moment, timeout_seconds=READY_SECONDS)
            repeat = await _first_token(client, target, prompt)
            done.append(
                Round(
                    killed=killed,
                    recovery=first.done - killed,
                    ttft_warm=warm[len(warm) // 2],
                    ttft_repeat=repeat,
                    **await target.explain(first.done),
                )
            )
            say(f"kill {number + 1} of {rounds}: answered again after {done[-1].recovery:.3f} s")
    failed = [answer for answer in load.answers if answer.failed]
    return Done(
        arm=arm,
        load="none",
        rounds=done,
        requests=len(load.answers),
        failed_requests=len(failed),
        problems=sorted({f"{answer.status}: {answer.problem}" for answer in failed})[:10],
        load_average=(0.0, 0.0),
    )


async def _first_token(client: httpx.AsyncClient, target: Target, prompt: list[int]) -> float:
    """Seconds to the first event of an answer of one token.

    Raises:
        BenchError: there was none.
    """
    began = time.monotonic()
    body = body_of(target.model, prompt, 1)
    try:
        async with client.stream("POST", target.url, json=body, headers=target.headers) as response:
            at = 0.0
            async for line in response.aiter_lines():
                if not at and line.startswith("data: {") and '"error"' not in line:
                    at = time.monotonic()
    except httpx.HTTPError as error:
        raise BenchError(f"a repeated prompt was not answered: {type(error).__name__}: {error}") from error
    if not at:
        raise BenchError(f"a repeated prompt was not answered: {response.status_code}")
    return at - began


async def _streams(arm: Arm, target: Target, rounds: int, say: Say, *, settle_seconds: float) -> Done:
    done = []
    clients = Clients(target.url, target.model, headers=target.headers)
    async with clients.running():
        for number in range(rounds):
            await clients.first_token_after(time.monotonic(), timeout_seconds=READY_SECONDS)
            # The load is to run for so long, whatever the engine does: the picture begins there.
            await asyncio.sleep(min(BEFORE_SECONDS + 0.5, 2 * settle_seconds))
            await target.settle()
            killed = await target.kill()
            moment = await target.back()
            first = await clients.first_token_after(moment, timeout_seconds=READY_SECONDS)
            done.append(Round(killed=killed, recovery=first - killed, **await target.explain(first)))
            say(f"kill {number + 1} of {rounds}: a token again after {done[-1].recovery:.3f} s")
        await asyncio.sleep(2 * settle_seconds)  # what the picture shows after the last kill
    return Done(
        arm=arm,
        load="streams",
        rounds=done,
        requests=len(clients.asked),
        failed_requests=sum(one.problems for one in clients.asked),
        problems=sorted(clients.problems)[:10],
        load_average=(0.0, 0.0),
        asked=clients.asked,
    )


def _moment(history: list[dict[str, Any]], state: str, epoch: int) -> float:
    """When the gateway took the pod's ``epoch`` for ``state``, the first time."""
    for entry in history:
        if entry["state"] == state and entry["epoch"] == epoch:
            return float(entry["monotonic"])
    raise BenchError(f"the gateway's history does not show {state} for epoch {epoch}: {history[-6:]}")
