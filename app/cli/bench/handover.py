"""What clients see of planned changes of places: ``hotspare bench handover``.

One pod under long streams of one token at a time, and one hand-over after the other, each as soon as the pod has a
spare again. A stream whose tokens are all there is compared with one to the same prompt that nobody disturbs, and
replaced by another. Of each hand-over: how long it took until the engine was relieved (``drain_seconds``, from the
request for it until the spare serves), and each stream's longest silence around it.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from app.cli.bench.streaming import Say, Streamed, prompt_of, spread, stream
from app.cli.bench.system import BenchError, System, running_system
from app.cli.bench.together import together
from workers.handover import START_PATH
from workers.hosts import authority
from workers.pod_key import HEADER_POD_KEY, read_pod_key
from workers.state import EngineState

PROMPT_TOKENS: Final = 32
READY_SECONDS: Final = 300.0
REQUEST_SECONDS: Final = 900.0
HANDOVER_SECONDS: Final = 120.0
WINDOW_SECONDS: Final = 30.0
"""A silence belongs to a hand-over if it began within so long of it; each is looked at until the next one."""
STEADY_EVENTS: Final = 5
"""Each stream has got so many events before the next hand-over."""


class Stream(msgspec.Struct, kw_only=True):
    """One stream of the load, as far as it is."""

    prompt: list[int]
    got: Streamed
    ended: bool = False


class Load:
    """So many streams at any time, each followed by another one."""

    def __init__(self, client: httpx.AsyncClient, model: str, *, streams: int, tokens: int) -> None:
        self._client = client
        self._model = model
        self._tokens = tokens
        self._count = streams
        self._numbers = itertools.count()
        self._stopping = False
        self.streams: list[Stream] = []

    def steady(self, since: float) -> bool:
        """Whether all streams that are to run have got a few events since then."""
        events = [sum(moment >= since for moment in one.got.at) for one in self.streams if not one.ended]
        return len(events) == self._count and all(count >= STEADY_EVENTS for count in events)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Stream while inside; on leaving, streams come to their end and no other begins."""
        async with together() as group:
            for _ in range(self._count):
                group.create_task(self._keep_on())
            yield self
            self._stopping = True

    async def _keep_on(self) -> None:
        while not self._stopping:
            prompt = prompt_of(next(self._numbers), PROMPT_TOKENS)
            one = Stream(prompt=prompt, got=Streamed())
            self.streams.append(one)
            await stream(self._client, self._model, prompt, self._tokens, got=one.got)
            one.ended = True


async def measure(*, engine: str, handovers: int, streams: int, tokens: int, say: Say) -> dict[str, Any]:
    """Hand over so often and return the report (see ``summarise``).

    Raises:
        BenchError: the system did not come up, or an engine could not hand over.
    """
    moments: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="hotspare-bench-") as folder:
        run_dir = Path(folder) / "run"
        async with (
            running_system(run_dir, flags=["--engine", engine], env={}, timeout_seconds=READY_SECONDS) as system,
            httpx.AsyncClient(
                base_url=system.gateway_url, headers=system.headers, timeout=REQUEST_SECONDS, trust_env=False
            ) as client,
        ):
            active: EngineState = await system.until(
                system.pair, saying="an active engine and a spare", timeout_seconds=READY_SECONDS
            )
            model = active.models[0]
            load = Load(client, model, streams=streams, tokens=tokens)
            async with load.running():
                for number in range(1, handovers + 1):
                    began, seconds = await _hand_over(system, load, run_dir)
                    moments.append((began, seconds))
                    say(f"hand-over {number} of {handovers}: the spare serves after {seconds:.3f} s")
            whole = [one for one in load.streams if not one.got.problem]
            room = asyncio.Semaphore(streams)  # no more at a time than before: a pod has room for so many

            async def undisturbed_by(one: Stream) -> Streamed:
                async with room:
                    return await stream(client, model, one.prompt, tokens)

            again = await asyncio.gather(*map(undisturbed_by, whole))
    for undisturbed in again:
        if undisturbed.problem:
            raise BenchError(f"an answer that nobody disturbed was not good: {undisturbed.problem}")
    wrong = sum(one.got.text != undisturbed.text for one, undisturbed in zip(whole, again, strict=True))
    return summarise(engine, load.streams, moments, wrong=wrong)


async def _hand_over(system: System, load: Load, run_dir: Path) -> tuple[float, float]:
    """Once there is a spare and the load is steady; when it began, and how long it took."""
    since = time.monotonic()

    async def ready() -> EngineState | None:
        return await system.pair() if load.steady(since) else None

    active: EngineState = await system.until(ready, saying="a spare, and a steady load", timeout_seconds=READY_SECONDS)
    port = system.pod["engines"][active.engine]["admin_port"]
    headers = {HEADER_POD_KEY: read_pod_key(run_dir / "pod-0")}
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=HANDOVER_SECONDS, trust_env=False) as client:
        answer = await client.post(
            f"http://{authority(system.pod['host'], port)}{START_PATH}", headers=headers, content=b"{}"
        )
    if answer.status_code != httpx.codes.OK:
        raise BenchError(f"engine {active.engine} did not hand over: {answer.text[:300]}")
    return began, time.monotonic() - began


def pauses(at: list[float], moments: list[tuple[float, float]]) -> list[float]:
    """A stream's longest silence around each hand-over that it went through: between two events of which the later came
    after its beginning. Pure."""
    found = []
    for number, (began, _) in enumerate(moments):
        until = moments[number + 1][0] if number + 1 < len(moments) else began + WINDOW_SECONDS
        around = [after - before for before, after in itertools.pairwise(at) if after >= began and before < until]
        if at and at[0] < began < at[-1] and around:
            found.append(max(around))
    return found


def summarise(engine: str, streams: list[Stream], moments: list[tuple[float, float]], *, wrong: int) -> dict[str, Any]:
    """The report: ``*_seconds`` as {"median", "p99", "max"}; ``lost`` and ``wrong`` are streams."""
    drains = [seconds for _, seconds in moments]
    silences = [silence for one in streams if not one.got.problem for silence in pauses(one.got.at, moments)]
    problems = [one.got.problem for one in streams if one.got.problem]
    return {
        "engine": engine,
        "handovers": len(moments),
        "streams": len(streams),
        "lost": len(problems),
        "wrong": wrong,
        "drain_seconds": spread(drains, "median", "p99", "max"),
        "pause_seconds": spread(silences, "median", "p99", "max"),
        "problems": sorted(set(problems))[:10],
    }
