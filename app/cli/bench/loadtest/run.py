"""A whole run: a fleet, if there is none to ask; Locust beside it; events; and what came of it."""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from app.cli.bench import simulated
from app.cli.bench.chaos.answers import SimAnswers
from app.cli.bench.loadtest.deeds import Deeds
from app.cli.bench.loadtest.figures import Figures
from app.cli.bench.loadtest.judging import FormJudge, Judge, SimJudge
from app.cli.bench.loadtest.process import generating
from app.cli.bench.loadtest.scenario import Scenario
from app.cli.bench.pods import model_of
from app.cli.bench.system import BenchError, System, running_system
from app.cli.bench.together import together
from app.cli.door import client_key, key_headers

READY_SECONDS: Final = 300.0
MODELS_SECONDS: Final = 10.0

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. ``model`` "": the first one that the host has."""

    name: str
    scenario: Scenario
    engine: str | None
    """None: a host's, which may be any."""
    host: str | None
    """None: a fleet is started."""
    model: str = ""


async def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Run it and return the report (``figures.Figures``).

    Raises:
        BenchError: the fleet did not come up, or ended; the host does not answer; or the generator ended.
    """
    with tempfile.TemporaryDirectory(prefix="hotspare-load-") as name:
        folder = Path(name)
        run_dir = folder / "run"
        if plan.host is not None:
            model = plan.model or await _first_model(plan.host)
            return await _under_load(plan, plan.host, model, None, Deeds(run_dir, (), say), folder, say)
        say(f"load: starting {plan.scenario.pods} pods")
        async with Deeds(run_dir, plan.scenario.events, say) as deeds, _fleet(plan, run_dir) as system:
            model = await system.until(
                lambda: model_of(run_dir, plan.scenario.pods),
                saying="each pod has a spare",
                timeout_seconds=READY_SECONDS,
            )
            return await _under_load(plan, system.gateway_url, model, system, deeds, folder, say)


@asynccontextmanager
async def _fleet(plan: Plan, run_dir: Path) -> AsyncIterator[System]:
    flags = ["--engine", plan.engine or "sim", "--pods", str(plan.scenario.pods)]
    env = simulated.settings() if plan.engine == "sim" else {}
    async with running_system(run_dir, flags=flags, env=env, timeout_seconds=READY_SECONDS) as system:
        yield system


async def _under_load(
    plan: Plan, host: str, model: str, system: System | None, deeds: Deeds, folder: Path, say: Say
) -> dict[str, Any]:
    scenario = plan.scenario
    judge: Judge = SimJudge(_sim_answers(plan, model), model) if plan.engine == "sim" else FormJudge()
    figures = Figures(scenario)
    say(f"load: {plan.name}, about {scenario.expected:.0f} requests in {scenario.seconds:g} s to {host}")
    async with generating(scenario, folder, host=host, model=model) as generator, together() as group:
        watching = group.create_task(system.run_on()) if system is not None else None
        following = group.create_task(generator.follow(scenario, judge, figures))
        doing = group.create_task(deeds.run(await generator.began()))
        await asyncio.wait([following, doing])
        if watching is not None:
            watching.cancel()
    about = {
        "scenario": plan.name,
        "seed": scenario.seed,
        "engine": plan.engine,
        "host": plan.host,
        "pods": scenario.pods if system is not None else None,
        "checked": judge.how,
        "seconds": scenario.seconds,
    }
    return figures.report(following.result(), deeds.done, about=about)


async def _first_model(host: str) -> str:
    headers = key_headers(client_key(os.environ))
    try:
        trusted = ssl.create_default_context()  # with SSL_CERT_FILE, as the generator; httpx takes certifi's
        async with httpx.AsyncClient(timeout=MODELS_SECONDS, trust_env=False, verify=trusted) as client:
            answer = await client.get(f"{host.rstrip('/')}/v1/models", headers=headers)
        if answer.status_code != httpx.codes.OK:
            raise BenchError(f"{host}/v1/models says {answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["data"][0]["id"])
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise BenchError(f"--host is a URL such as http://localhost:8000, not {host}") from None
    except httpx.ConnectError as error:
        raise BenchError(f"nobody answers at {host} ({error})") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{host}/v1/models names no model ({type(error).__name__}: {error})") from None


def _sim_answers(plan: Plan, model: str) -> SimAnswers:
    """Of a fleet of ours; or of a host whose sim engines have the seed that this environment has."""
    if plan.host is None:
        return simulated.answers(model)
    seed = os.environ.get("HOTSPARE_SIM_SEED", "0")
    size = os.environ.get("HOTSPARE_SIM_WEIGHTS_BYTES", str(simulated.WEIGHTS_BYTES))
    try:
        return SimAnswers(model=model, seed=int(seed), weights_bytes=int(size))
    except ValueError:
        raise BenchError("HOTSPARE_SIM_SEED and HOTSPARE_SIM_WEIGHTS_BYTES must be numbers") from None
