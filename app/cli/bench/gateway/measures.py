"""The measures: each one run of the generator, or two, against one gateway, and the figures taken from it."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from app.cli.bench.gateway.children import STOP_SECONDS, Child, Cores, clean_environment
from app.cli.bench.gateway.figures import Load, Sample, memory_figure, parse_load
from app.cli.bench.gateway.gateways import Running, ask
from app.cli.bench.gateway.native import Tools
from app.cli.bench.system import BenchError

WORKERS: Final = 2
START_SECONDS: Final = 10.0
WARM_REQUESTS: Final = 500
PACED_STREAMS: Final = 128
PACED_INTERVAL_US: Final = 20_000
SATURATED_STREAMS: Final = 64
SATURATED_TOKENS: Final = 200
TTFT_TOKENS: Final = 5
TTFT_INTERVAL_US: Final = 2_000
HELD_TOKENS: Final = 500
"""What each slow stream has delivered when memory is read."""
HELD_MORE_TOKENS: Final = 60
"""And what is still to come then, one every five seconds until it is told to finish."""
HELD_INTERVAL_US: Final = 5_000_000
HELD_BODY_BYTES: Final = 8 * 1024
HELD_RAMP: Final = 1000
HELD_SECONDS: Final = 280.0
"""All must have come before the first ones have sent everything."""


class Bench(NamedTuple):
    """What a measure works with."""

    tools: Tools
    cores: Cores
    folder: Path
    workers: tuple[int, ...]
    key: str
    seconds: float


@contextmanager
def mock_workers(tools: Tools, cores: Cores, folder: Path) -> Iterator[tuple[int, ...]]:
    """The workers' ports."""
    with ExitStack() as stack:
        ports = []
        for number in range(WORKERS):
            worker = stack.enter_context(
                Child(
                    tools.launch,
                    [str(tools.worker)],
                    cores=cores.others,
                    log=folder / f"worker-{number}.log",
                    env=clean_environment(os.environ),
                    stdout=subprocess.PIPE,
                )
            )
            line = read_line(worker, START_SECONDS)
            if not line.strip().isdigit():
                raise BenchError(f"a mock worker did not start:\n{worker.log_tail()}")
            ports.append(int(line))
        yield tuple(ports)


def read_line(child: Child, seconds: float) -> str:
    """The next line of its output; empty if it ended.

    Raises:
        BenchError: nothing came in time.
    """
    if not select.select([child.stdout], [], [], seconds)[0]:
        raise BenchError(f"nothing was heard from a {child.name} for {seconds:g} s")
    return child.stdout.readline()


def warm(bench: Bench, running: Running) -> None:
    """Connections opened, code paths taken."""
    _run(bench, running, connections=32, requests=WARM_REQUESTS)
    _run(bench, running, connections=32, requests=32, tokens=20)


class _Run(NamedTuple):
    load: Load
    cpu_seconds: float
    complaint: str


def _options(running: Running, options: Mapping[str, float]) -> list[str]:
    words = ["--port", str(running.port), "--header", f"authorization: Bearer {running.key}"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _generator(bench: Bench, running: Running, options: Mapping[str, float]) -> Child:
    return Child(
        bench.tools.launch,
        [str(bench.tools.load), *_options(running, options)],
        cores=bench.cores.others,
        log=bench.folder / "load.log",
        env=clean_environment(os.environ),
        stdout=subprocess.PIPE,
    )


def _run(bench: Bench, running: Running, **options: float) -> _Run:
    """One run of the generator, and what the gateway spent on it.

    Raises:
        BenchError: the generator does not come to an end, or says nothing that can be read.
    """
    gateway = running.child
    if gateway is not None:
        gateway.forget_log()
    before = gateway.cpu_seconds() if gateway is not None else 0.0
    with _generator(bench, running, options) as generator:
        return _finished(generator, gateway, before)


def _finished(generator: Child, gateway: Child | None, before: float) -> _Run:
    line = read_line(generator, HELD_SECONDS)
    spent = gateway.cpu_seconds() - before if gateway is not None else 0.0
    complaint = generator.log_tail()
    generator.forget_log()
    try:
        return _Run(parse_load(line), spent, complaint)
    except msgspec.DecodeError as error:
        ended = f"ended with {generator.wait(STOP_SECONDS)}" if not line else f"said {line.strip()}"
        raise BenchError(f"the load generator {ended}\n{complaint}") from error


def _sample(running: Running, measure: str, round_: int, run: _Run, figures: Mapping[str, float]) -> Sample:
    return Sample(
        gateway=running.name,
        measure=measure,
        round=round_,
        figures={name: value for name, value in figures.items() if value > 0} if run.load.sound else {},
        completed=run.load.completed,
        failed=run.load.failed.total,
        problem="" if run.load.sound else f"{run.load.failed}, last status {run.load.last_status}: {run.complaint}",
    )


def _rps(bench: Bench, running: Running, round_: int) -> Iterator[Sample]:
    for connections in (1, 32, 256):
        run = _run(bench, running, connections=connections, seconds=bench.seconds)
        figures = {f"rps_c{connections}": run.load.requests_per_second}
        if connections == 32 and run.load.completed:
            figures["cpu_per_request_us"] = run.cpu_seconds / run.load.completed * 1e6
            figures["busy_c32"] = run.cpu_seconds / run.load.seconds
        yield _sample(running, f"rps, {connections} connections", round_, run, figures)


def _ttft(bench: Bench, running: Running, round_: int) -> Iterator[Sample]:
    run = _run(bench, running, connections=1, seconds=bench.seconds, tokens=TTFT_TOKENS, interval_us=TTFT_INTERVAL_US)
    first = run.load.first_event_us
    yield _sample(running, "time to first token", round_, run, {"ttft_us": first.p50} if first else {})


def _paced(bench: Bench, running: Running, round_: int) -> Iterator[Sample]:
    tokens = max(5, int(bench.seconds * 1e6 / PACED_INTERVAL_US))
    run = _run(
        bench,
        running,
        connections=PACED_STREAMS,
        requests=PACED_STREAMS,
        tokens=tokens,
        interval_us=PACED_INTERVAL_US,
    )
    figures = {"paced_cpu_us": run.cpu_seconds / run.load.events * 1e6} if run.load.events else {}
    sample = _sample(running, "paced streams", round_, run, figures)
    if run.load.seconds < (tokens - 1) * PACED_INTERVAL_US / 1e6 and sample.figures:
        said = f"the streams took {run.load.seconds:.2f} s: the gateway changed the request that sets their pace"
        sample = msgspec.structs.replace(sample, figures={}, problem=said)
    yield sample


def _saturated(bench: Bench, running: Running, round_: int) -> Iterator[Sample]:
    run = _run(bench, running, connections=SATURATED_STREAMS, seconds=bench.seconds, tokens=SATURATED_TOKENS)
    figures = {"events_per_s": run.load.events_per_second}
    if run.load.events:
        figures["cpu_per_event_us"] = run.cpu_seconds / run.load.events * 1e6
    yield _sample(running, "saturation", round_, run, figures)


MEASURES: Final[Mapping[str, Callable[[Bench, Running, int], Iterator[Sample]]]] = {
    "rps": _rps,
    "ttft": _ttft,
    "paced": _paced,
    "saturation": _saturated,
}
"""Those that take turns in rounds. The fourth kind, memory, wants each gateway fresh and alone."""
MEMORY: Final = "memory"


def hold_streams(bench: Bench, running: Running, streams: int) -> Iterator[Sample]:
    """Memory per stream, of streams that have delivered 500 tokens and go on slowly.

    Raises:
        BenchError: they do not come that far in time.
    """
    gateway = running.child
    if gateway is None:
        raise ValueError("a worker itself is not measured")
    before = gateway.pss_bytes()
    spent = gateway.cpu_seconds()
    options = {
        "connections": streams,
        "requests": streams,
        "tokens": HELD_TOKENS + HELD_MORE_TOKENS,
        "burst": HELD_TOKENS,
        "interval_us": HELD_INTERVAL_US,
        "body_bytes": HELD_BODY_BYTES,
        "ramp": HELD_RAMP,
        "timeout": 2 * HELD_SECONDS,
        "announce": HELD_TOKENS,
    }
    with _generator(bench, running, options) as generator:
        if not read_line(generator, HELD_SECONDS).startswith('{"held"'):
            raise BenchError(f"the load generator ended before all streams had come\n{generator.log_tail()}")
        held = active_streams(bench.workers)
        grown = gateway.pss_bytes() - before
        for worker in bench.workers:
            ask(worker, "/mock/finish", b"{}")
        run = _finished(generator, gateway, spent)
    name = f"memory, {streams} streams"
    sample = _sample(running, name, 0, run, {memory_figure(streams): grown / 1024 / streams})
    if held != streams and sample.figures:
        said = f"{held} of {streams} streams were there when memory was read"
        sample = msgspec.structs.replace(sample, figures={}, problem=said)
    yield sample


def active_streams(workers: Sequence[int]) -> int:
    """Streams that the mock workers have under way."""
    total = 0
    for worker in workers:
        stats = ask(worker, "/mock/stats")
        if not isinstance(stats, dict):
            raise BenchError(f"a mock worker says {stats!r} of itself")
        total += int(stats["active"])
    return total


def settle(bench: Bench, seconds: float = 5.0) -> None:
    """Until no stream is under way: what one measure started must not cost the next one.

    Raises:
        BenchError: some go on.
    """
    deadline = time.monotonic() + seconds
    while active_streams(bench.workers):
        if time.monotonic() > deadline:
            raise BenchError("streams of an earlier measurement do not end")
        time.sleep(0.02)
