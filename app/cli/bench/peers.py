"""What other gateways make of a kill: ``hotspare bench resume --peers …``.

A pod as the one that our own gateway is measured with, but without a worker token, which no other gateway shows; each
peer in front of its serving port, one after the other, as ``hotspare bench gateway`` starts them. The streams, the
kills and the moments of them are the same. What counts is how the stream ends for its client.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from app.cli.bench.gateway import gateways
from app.cli.bench.gateway.gateways import Gateway, NotInstalledError, Running, Surroundings
from app.cli.bench.gateway.native import build
from app.cli.bench.resume import REQUEST_SECONDS, delivered_at, strike
from app.cli.bench.streaming import Say, Streamed, stream
from app.cli.bench.system import BenchError, System, running_pod
from workers.hosts import authority

READY_SECONDS: Final = 300.0
BACK_SECONDS: Final = 120.0
"""Until a peer has found the pod again."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How one stream ended for the client of a peer."""

    how: str
    """``whole``; ``wrong``: with its end, but not all of it; ``error``: an event said so; ``cut``."""
    delivered: int
    """Events that the client has."""
    saying: str


async def measure_peers(
    names: Sequence[str],
    peers_dir: Path,
    folder: Path,
    *,
    engine: str,
    kills: int,
    say: Say,
    settle_seconds: float,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Each peer's part of the report, and why others have none.

    Raises:
        BenchError: the pod did not come up.
    """
    report: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    found: list[Gateway] = []
    for name in names:
        try:
            found.append(gateways.find(name, peers_dir))
        except NotInstalledError as error:
            skipped[name] = str(error)
    if not found:
        return report, skipped
    tools = build(folder)
    async with running_pod(folder / "peers", engine=engine, timeout_seconds=READY_SECONDS) as system:
        active = await system.engine("ACTIVE")
        around = Surroundings(
            launcher=tools.launch,
            folder=folder,
            workers=(system.serving[1],),
            core=frozenset(os.sched_getaffinity(0)),
            key="",
            model=str(active["models"][0]),
        )
        for gateway in found:
            with ExitStack() as stack:
                try:
                    running = stack.enter_context(gateways.started(gateway, around))
                    ended = await _kills(system, running, kills, say, settle_seconds=settle_seconds)
                except BenchError as error:
                    skipped[gateway.name] = str(error)
                    say(f"{gateway.name}: {error}")
                    continue
            report[gateway.name] = {"version": gateway.version, **summarise(ended)}
    return report, skipped


async def _kills(system: System, running: Running, kills: int, say: Say, *, settle_seconds: float) -> list[Ended]:
    host, port = system.serving
    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{running.port}", timeout=REQUEST_SECONDS, trust_env=False
        ) as client,
        httpx.AsyncClient(
            base_url=f"http://{authority(host, port)}", timeout=REQUEST_SECONDS, trust_env=False
        ) as direct,
    ):
        ended = []
        for number in range(kills):
            await _answers(system, client, running.name)
            delivered = delivered_at(number, kills)
            struck = await strike(system, client, number, delivered=delivered, settle_seconds=settle_seconds)
            undisturbed = await stream(direct, struck.model, struck.prompt)
            if undisturbed.problem:
                raise BenchError(f"an answer that nobody disturbed was not good: {undisturbed.problem}")
            ended.append(end_of(struck.got, undisturbed))
            say(f"{running.name}, kill {number + 1} of {kills}: {ended[-1].how} {ended[-1].saying}")
        return ended


async def _answers(system: System, client: httpx.AsyncClient, name: str) -> None:
    """Once the peer routes to whoever is active."""

    async def answered() -> bool:
        active = await system.engine("ACTIVE")
        return bool(active) and not (await stream(client, str(active["models"][0]), [40], 1)).problem

    await system.until(answered, saying=f"{name} has found the pod again", timeout_seconds=BACK_SECONDS)


def end_of(got: Streamed, undisturbed: Streamed) -> Ended:
    """What a client would say of its stream."""
    ended = "whole" if got.text == undisturbed.text else "wrong"
    broken = "error" if got.told else "cut"
    return Ended(how=broken if got.problem else ended, delivered=len(got.at), saying=got.problem)


def summarise(ended: Sequence[Ended]) -> dict[str, Any]:
    """A peer's part of the report: how many streams ended how, and after how many events."""
    report: dict[str, Any] = {"kills": len(ended)}
    report |= {how: sum(one.how == how for one in ended) for how in ("whole", "wrong", "error", "cut")}
    return report | {
        "delivered": [one.delivered for one in ended],
        "problems": [one.saying for one in ended if one.saying],
    }
