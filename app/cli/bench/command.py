"""``hotspare bench …`` as Typer sees it: options, progress on stderr, the result on stdout."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import typer

from app.cli.errors import CliError

SECONDS = (
    ("cold_restart", "cold restart: SIGKILL → first request answered"),
    ("recovery", "with a shadow: SIGKILL → first request answered"),
    ("teardown", "  SIGKILL → lock free"),
    ("promote", "  lock free → routable in the gateway"),
    ("first_token", "  routable → first answer"),
    ("detect", "engine's EOF → SUSPECT in the gateway"),
    ("redundancy", "SIGKILL → a parked shadow again"),
)
PLAIN = (
    ("ratio", "cold restart ÷ recovery (medians)"),
    ("failed_requests", "requests without a good answer, both arms"),
    ("requests", "requests sent"),
    ("weights_copies", "copies of the weights outside the memory service"),
    ("parked_private_mib", "private memory of a parked engine, MiB"),
)


def build() -> typer.Typer:
    """The ``bench`` group."""
    group = typer.Typer(help="Measure: ratios within one run on this machine.", no_args_is_help=True)
    group.callback()(_group)  # with a single command Typer would drop the group's name
    group.command("recovery")(_recovery)
    return group


def _group() -> None:
    pass


def _recovery(
    engine: Annotated[Literal["vllm", "sim"], typer.Option(help="Which engine.")] = "vllm",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Kills in each arm.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """How long a killed engine is missed, with a shadow and without one."""
    from app.cli.bench.recovery import measure
    from app.cli.bench.system import BenchError

    try:
        report = asyncio.run(measure(engine=engine, rounds=rounds, say=_say))
    except BenchError as error:
        raise CliError(f"bench recovery: {error}") from error
    except TimeoutError as error:
        raise CliError("bench recovery: requests were not answered within five minutes") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(_table(report)))
    if report["failed_requests"]:
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(report: dict[str, Any]) -> list[str]:
    """The report for people, as a Markdown table."""
    rows = ["| | median | max |", "| --- | ---: | ---: |"]
    for name, meaning in SECONDS:
        spread = report[f"{name}_seconds"]
        rows.append(f"| {meaning.strip()} | {_seconds(spread['median'])} | {_seconds(spread['max'])} |")
    rows += ["", "| | |", "| --- | ---: |"]
    rows += [f"| {meaning} | {report[name]:g} |" for name, meaning in PLAIN]
    rows += [f"\nproblem: {problem}" for problem in report["problems"]]
    return rows


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"
