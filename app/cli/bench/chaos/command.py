"""``hotspare bench chaos`` as Typer sees it."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated, Any, Literal

import typer

from app.cli.errors import CliError

_DEFAULTS: dict[str, tuple[float, float, int]] = {"sim": (120.0, 1.0, 64), "vllm": (60.0, 10.0, 4)}


def chaos(
    engine: Annotated[Literal["sim", "vllm"], typer.Option(help="Which engine.")] = "sim",
    seconds: Annotated[
        float | None, typer.Option(min=2, max=86400, help="How long new requests are sent (sim: 120, vllm: 60).")
    ] = None,
    kill_every: Annotated[
        float | None, typer.Option(min=0.2, max=3600, help="Seconds from kill to kill (sim: 1, vllm: 10).")
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Clients, each with one request at a time (sim: 64, vllm: 4).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Decides what is killed and asked. [default: a random one]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Kill engines and memory services of two pods at random under mixed load, and look at every answer.

    Ends with 1 if a request was lost, or an answer was wrong.
    """
    from app.cli.bench.chaos.run import Plan, measure
    from app.cli.bench.ending import run
    from app.cli.bench.system import BenchError

    usual = _DEFAULTS[engine]
    plan = Plan(
        engine=engine,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        seconds=usual[0] if seconds is None else seconds,
        kill_every=usual[1] if kill_every is None else kill_every,
        streams=usual[2] if streams is None else streams,
    )
    try:
        report = run(measure(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    except BenchError as error:
        raise CliError(f"bench chaos: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(_table(report)))
    if report["lost"] or report["wrong"]:
        raise typer.Exit(1)


def _table(report: dict[str, Any]) -> list[str]:
    """The report for people, as Markdown tables."""
    rows = ["| | |", "| --- | ---: |"]
    rows += [f"| {name} | {report[name]} |" for name in ("seed", "requests", "good", "left", "lost", "wrong")]
    rows += [f"| refused: {code} | {count} |" for code, count in report["refused"].items()]
    rows += [f"| kills: {kind} | {count} |" for kind, count in report["kills"].items()]
    rows += [f"| kills skipped | {report['kills_skipped']} |"]
    rows += ["", "| silence of a stream at | count | p50 | p99 | max |", "| --- | ---: | ---: | ---: | ---: |"]
    for kind, figures in {**report["stall_seconds"], "lateness of the load's timers": report["late_seconds"]}.items():
        shown = ("-" if figures[name] is None else f"{figures[name]:.3f} s" for name in ("p50", "p99", "max"))
        rows.append(f"| {kind} | {figures['count']} | {' | '.join(shown)} |")
    rows += [f"\nproblem: {problem}" for problem in report["problems"]]
    return rows
