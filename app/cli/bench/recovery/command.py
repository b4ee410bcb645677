"""``hotspare bench recovery`` as Typer sees it."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal

import typer

from app.cli.bench.recovery.arms import ARMS, LOADS
from app.cli.bench.words import words
from app.cli.errors import CliError

MEANINGS: Final = {
    "recovery": "SIGKILL → first answer or token",
    "teardown": "  of which SIGKILL → lock free",
    "lock": "  lock free → epoch written",
    "map": "  epoch written → KV pages mapped",
    "bind": "  KV pages mapped → port bound",
    "routable": "  port bound → routable in the gateway",
    "first_token": "  routable → first answer or token",
    "detect": "engine's EOF → SUSPECT in the gateway",
    "redundancy": "SIGKILL → a parked shadow again",
    "ttft_warm": "first token of a repeated prompt, before the kill",
    "ttft_repeat": "first token of that prompt after it",
}
RATIOS: Final = (
    ("stock_ratio", "stock ÷ shadow (medians)"),
    ("ratio", "cold ÷ shadow (medians)"),
    ("p99_ratio", "99th percentile ÷ median, shadow"),
    ("failed_requests", "requests without a good answer, all arms of ours"),
    ("requests", "requests sent"),
    ("weights_copies", "copies of the weights outside the memory service"),
    ("parked_private_mib", "private memory of a parked engine, MiB"),
)


def recovery(
    engine: Annotated[Literal["vllm", "sim"], typer.Option(help="Which engine.")] = "vllm",
    kills: Annotated[
        int, typer.Option("--kills", "--rounds", min=1, max=1000, help="Kills of arms with a shadow.")
    ] = 5,
    restarts: Annotated[
        int, typer.Option(min=0, max=1000, help="Kills of each other arm; 0: as many, but five at most.")
    ] = 0,
    arms: Annotated[str, typer.Option(help=f"Which ones, comma separated, of {', '.join(ARMS)}.")] = ",".join(ARMS),
    load: Annotated[str, typer.Option(help=f"Under which loads, comma separated, of {', '.join(LOADS)}.")] = ",".join(
        LOADS
    ),
    settle_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds that an engine serves before it is killed.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """How long a killed engine is missed: with vLLM's own server, without and with each part of ours.

    Ends with 1 if a request to one of ours failed, or an arm was not recovered. scripts/draw_recovery.py makes a
    picture of the JSON.
    """
    from app.cli.bench.ending import run
    from app.cli.bench.recovery.measure import measure
    from app.cli.bench.system import BenchError

    names = words(arms, tuple(ARMS), "bench recovery: --arms")
    loads = words(load, LOADS, "bench recovery: --load")
    try:
        report = run(
            measure(
                engine=engine,
                kills=kills,
                restarts=restarts or min(kills, 5),
                arms=names,
                loads=loads,
                say=_say,
                settle_seconds=settle_seconds,
            )
        )
    except BenchError as error:
        raise CliError(f"bench recovery: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(table(report)))
    if report["failed_requests"] or report["broken"]:
        raise typer.Exit(1)


def table(report: dict[str, Any]) -> list[str]:
    """The report for people: a Markdown table a load, with a column for each arm."""
    rows: list[str] = []
    for load in LOADS:
        columns = {name: arm[load] for name, arm in report["arms"].items() if load in arm}
        if not columns:
            continue
        rows += [f"load: {load}; median / p99 (of so many kills)", ""]
        rows += [f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        rows.append(f"| kills | {' | '.join(str(column['kills']) for column in columns.values())} |")
        for name, meaning in MEANINGS.items():
            spreads = [column.get(f"{name}_seconds") for column in columns.values()]
            if any(spreads):
                cells = (f"{seconds(s['median'])} / {seconds(s['p99'])}" if s else "-" for s in spreads)
                rows.append(f"| {meaning.strip()} | {' | '.join(cells)} |")
        for name, meaning in (
            ("ttft_repeat_ratio", "after ÷ before"),
            ("failed_requests", "requests that failed"),
            ("requests", "of so many"),
            ("load_average", "load of the machine before, after"),
        ):
            cells = (shown(column.get(name)) for column in columns.values())
            rows.append(f"| {meaning} | {' | '.join(cells)} |")
        rows.append("")
    rows += ["| | |", "| --- | ---: |"]
    rows += [f"| {meaning} | {report[name]:g} |" for name, meaning in RATIOS if name in report]
    rows += [f"\nproblem: {problem}" for problem in report["problems"]]
    rows += [f"\n{name} was left out: {why}" for name, why in report["skipped"].items()]
    rows += [f"\n{name} was given up: {why}" for name, why in report["broken"].items()]
    return rows


def shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(f"{one:g}" for one in value)
    return "-" if value is None else f"{value:g}"


def seconds(value: float) -> str:
    """In a unit that fits."""
    if abs(value) < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
