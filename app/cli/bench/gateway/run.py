"""One run of ``hotspare bench gateway``: everything started, measured in turn, and ended."""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from app.cli.bench.ending import sigterm_unwinds
from app.cli.bench.gateway import gateways
from app.cli.bench.gateway.children import Cores, choose_cores, most_descriptors, own_cores
from app.cli.bench.gateway.figures import DIRECT, OURS, RATIOS, Ratio, Sample, stream_ratios, summarise
from app.cli.bench.gateway.gateways import Gateway, NotInstalledError, Running, Surroundings
from app.cli.bench.gateway.measures import MEASURES, MEMORY, Bench, hold_streams, mock_workers, settle, warm
from app.cli.bench.gateway.native import build
from app.cli.bench.system import BenchError

SPARE_DESCRIPTORS: Final = 256
Say = Callable[[str], None]


class Plan(NamedTuple):
    """What is asked for."""

    peers: Sequence[str]
    peers_dir: Path
    rounds: int
    seconds: float
    measures: Sequence[str]
    streams: Sequence[int]


def ratios(plan: Plan) -> tuple[Ratio, ...]:
    return RATIOS + stream_ratios(plan.streams)


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """The report.

    Raises:
        BenchError: the measurement cannot be made.
    """
    sigterm_unwinds()
    cores = choose_cores()
    if not cores.apart:
        say("one core only: the gateway shares it with workers and load, and figures mean little")
    load_before = os.getloadavg()
    skipped: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hotspare-bench-") as name,
        most_descriptors() as descriptors,
        own_cores(cores.others),
    ):
        folder = Path(name)
        say("compiling the mock worker and the load generator")
        tools = build(folder)
        found = _find(plan, skipped)
        with mock_workers(tools, cores, folder) as workers:
            bench = Bench(tools, cores, folder, workers, secrets.token_urlsafe(), plan.seconds)
            samples = _in_turns(bench, found, plan, skipped, say)
            samples += _memory(bench, found, plan, skipped, descriptors, say)
    versions = {DIRECT: ""} if any(sample.gateway == DIRECT for sample in samples) else {}
    versions |= {gateway.name: gateway.version for gateway in found if gateway.name not in skipped}
    return summarise(samples, ratios(plan), versions, _about(plan, cores, load_before, skipped))


def _find(plan: Plan, skipped: dict[str, str]) -> list[Gateway]:
    found = [gateways.find(OURS, plan.peers_dir)]
    for peer in plan.peers:
        try:
            found.append(gateways.find(peer, plan.peers_dir))
        except NotInstalledError as error:
            skipped[peer] = str(error)
    return found


def _around(bench: Bench) -> Surroundings:
    return Surroundings(bench.tools.launch, bench.folder, bench.workers, bench.cores.gateway, bench.key)


@contextmanager
def _up(bench: Bench, found: Sequence[Gateway], skipped: dict[str, str], say: Say) -> Iterator[list[Running]]:
    """All of them, warm. A peer that does not start is skipped; without ours there is nothing to measure."""
    around = _around(bench)
    with ExitStack() as stack:
        running: list[Running] = []
        for gateway in found:
            if gateway.name in skipped:
                continue
            say(f"starting {gateway.name} {gateway.version}")
            try:
                running.append(stack.enter_context(gateways.started(gateway, around)))
            except BenchError as error:
                if gateway.name == OURS:
                    raise
                skipped[gateway.name] = str(error)
                continue
            warm(bench, running[-1])
        yield running


def _in_turns(bench: Bench, found: Sequence[Gateway], plan: Plan, skipped: dict[str, str], say: Say) -> list[Sample]:
    """Rounds over all gateways at once, each round in the other direction, so that what else the machine does, and
    what one measure leaves behind, hits all of them."""
    wanted = [name for name in MEASURES if name in plan.measures]
    samples: list[Sample] = []
    if not wanted:
        return samples
    with _up(bench, found, skipped, say) as running:
        order = [gateways.direct(_around(bench)), *running]
        for round_ in range(plan.rounds):
            for name in wanted:
                say(f"round {round_ + 1} of {plan.rounds}: {name}")
                for gateway in order if round_ % 2 == 0 else reversed(order):
                    samples += _guarded(gateway, name, round_, partial(MEASURES[name], bench, gateway, round_))
                    settle(bench)
    return samples


def _memory(
    bench: Bench, found: Sequence[Gateway], plan: Plan, skipped: dict[str, str], descriptors: int, say: Say
) -> list[Sample]:
    samples: list[Sample] = []
    if MEMORY not in plan.measures:
        return samples
    for streams in plan.streams:
        needed = 2 * streams + SPARE_DESCRIPTORS
        if needed > descriptors:
            say(f"{streams} streams need {needed} file descriptors, and `ulimit -Hn` is {descriptors}: not measured")
            skipped[f"{streams} streams"] = f"{needed} file descriptors are needed, `ulimit -Hn` is {descriptors}"
            continue
        for gateway in found:
            say(f"memory of {streams} streams: {gateway.name}")
            with _up(bench, [gateway], skipped, lambda _: None) as running:
                for one in running:
                    held = partial(hold_streams, bench, one, streams)
                    samples += _guarded(one, f"memory, {streams} streams", 0, held)
            settle(bench)
    return samples


def _guarded(gateway: Running, name: str, round_: int, measured: Callable[[], Iterable[Sample]]) -> list[Sample]:
    """The samples; a peer that spoils a measure is a sample that says so, and the others go on."""
    try:
        return list(measured())
    except BenchError as error:
        if gateway.name in (OURS, DIRECT):
            raise
        problem = Sample(
            gateway=gateway.name, measure=name, round=round_, figures={}, completed=0, failed=0, problem=str(error)
        )
        return [problem]


def _about(plan: Plan, cores: Cores, load_before: Sequence[float], skipped: dict[str, str]) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "gateway_core": sorted(cores.gateway),
            "other_core": sorted(cores.others),
            "apart": cores.apart,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average_before": [round(value, 2) for value in load_before],
            "load_average_after": [round(value, 2) for value in os.getloadavg()],
        },
        "skipped": skipped,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
