"""``hotspare bench load`` as Typer sees it."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from app.cli.errors import CliError
from workers.exit_codes import ExitCode

FIGURES = ("ttft_seconds", "itl_seconds", "total_seconds")


def load(
    scenario: Annotated[
        str, typer.Argument(help="Name of a scenario, or a YAML file (docs/load-tests.md).")
    ] = "steady",
    host: Annotated[
        str | None, typer.Option(help="Ask this server, e.g. http://127.0.0.1:8000. [default: a fleet started for it]")
    ] = None,
    engine: Annotated[
        Literal["sim", "vllm"] | None,
        typer.Option(help="The fleet's engine, or with --host the host's. [default: sim, of a fleet]"),
    ] = None,
    model: Annotated[str, typer.Option(help="Which model of the host to ask. [default: its first one]")] = "",
    rate: Annotated[float, typer.Option(min=0.001, max=1000, help="All rates of the scenario times this.")] = 1.0,
    time: Annotated[float, typer.Option(min=0.001, max=1000, help="All its times times this.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Send a scenario's requests when they are due, whatever the answers do, and measure and check these.

    Ends with 1 if a request was lost, an answer was wrong, or a limit of the scenario was broken.
    """
    from app.cli.bench.ending import run
    from app.cli.bench.loadtest.process import missing
    from app.cli.bench.loadtest.run import Plan, measure
    from app.cli.bench.system import BenchError

    if absent := missing():
        raise CliError(f"bench load: {absent}", code=ExitCode.BAD_CONFIGURATION)
    from app.cli.bench.loadtest.figures import failings
    from app.cli.bench.loadtest.files import read_scenario
    from app.cli.bench.loadtest.scenario import ScenarioError, scaled

    try:
        read = scaled(read_scenario(scenario), rate=rate, time=time)
    except ScenarioError as error:
        raise CliError(f"bench load: {error}", code=ExitCode.BAD_CONFIGURATION) from error
    if host is not None and read.events:
        raise CliError(
            "bench load: the scenario has events, and they are done only to a fleet that this command started itself: "
            "leave --host out, or take the events out of the scenario",
            code=ExitCode.BAD_CONFIGURATION,
        )
    if host is None and model:
        raise CliError("bench load: --model is for --host", code=ExitCode.BAD_CONFIGURATION)
    plan = Plan(
        name=scenario, scenario=read, engine=engine or ("sim" if host is None else None), host=host, model=model
    )
    try:
        report = run(measure(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    except BenchError as error:
        raise CliError(f"bench load: {error}", code=ExitCode.BAD_CONFIGURATION) from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(table(report)))
    for sentence in failings(report):
        print(f"failed: {sentence}", file=sys.stderr)
    if not report["passed"]:
        raise typer.Exit(1)


def table(report: dict[str, Any]) -> list[str]:
    """The report for people, as Markdown tables."""
    rows = ["| | requests | failed | tok/s | stalls | TTFT p50, p99 | ITL p50, p99 | total p50, p99 |"]
    rows += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    rows += [_row(kind, tally) for kind, tally in report["kinds"].items()]
    rows += [_row("all", report["all"]), ""]
    if len(report["phases"]) > 1:
        rows += ["| phase | requests | failed | tok/s | stalls | TTFT p50, p99 | ITL p50, p99 | total p50, p99 |"]
        rows += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        rows += [*(_row(phase["name"], phase) for phase in report["phases"]), ""]
    rows += ["| | |", "| --- | ---: |"]
    rows += [f"| {name} | {report[name]} |" for name in ("seed", "requests", "good", "left", "lost", "wrong")]
    rows += [f"| refused: {code} | {count} |" for code, count in report["refused"].items()]
    rows += [f"| answers checked by their | {report['checked']} |"]
    generator = report["generator"]
    rows += [f"| generator: late p50, p99 | {_pair(generator['late_seconds'])} |"]
    rows += [f"| generator: share of a core | {generator['processor_share']:.0%} |"]
    rows += [f"| generator: most requests out at a time | {generator['most_outstanding']} |"]
    for event in report["events"]:
        said = event["problem"] or event["told"]
        rows.append(f"\nat {event['began_at']:.1f} s, {event['do']} of pod {event['pod']}: {said}")
    rows += [
        f"\nlimit {limit['name']} {limit['limit']:g}: {'kept' if limit['kept'] else 'BROKEN'}, {_value(limit['value'])}"
        for limit in report["limits"]
    ]
    return [*rows, *(f"\nproblem: {problem}" for problem in report["problems"])]


def _row(name: str, tally: dict[str, Any]) -> str:
    speed = "-" if tally["tokens_per_second"] is None else round(tally["tokens_per_second"])
    counts = (tally["requests"], tally["failures"], speed, tally["stall_seconds"]["count"])
    return f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(_pair(tally[figure]) for figure in FIGURES)} |"


def _pair(spread: dict[str, Any]) -> str:
    return "-" if spread["p50"] is None else f"{spread['p50'] * 1000:.1f}, {spread['p99'] * 1000:.1f} ms"


def _value(value: float | None) -> str:
    return "there was none" if value is None else f"{value:g}"
