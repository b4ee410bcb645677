"""``hotspare bench gateway`` as Typer sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from app.cli.bench.words import words
from app.cli.errors import CliError
from workers.exit_codes import ExitCode


def gateway(
    peers: Annotated[
        str, typer.Option(help="Who else is measured, comma separated: nginx, vllm-router, sglang-router.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds over all gateways; medians are taken.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long each measure of a round takes.")] = 2.0,
    only: Annotated[
        str, typer.Option(help="Some measures only, comma separated: rps, ttft, paced, saturation, memory.")
    ] = "",
    streams: Annotated[str, typer.Option(help="How many slow streams memory is read at.")] = "1000,5000",
    peers_dir: Annotated[Path, typer.Option(help="Where `make bench-peers` put the routers.")] = Path(".peers"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """What the gateway costs, beside other gateways over the same mock workers.

    One process on one core each, workers and load on another. Needs a C compiler.
    """
    from app.cli.bench.gateway.figures import table
    from app.cli.bench.gateway.gateways import PEERS
    from app.cli.bench.gateway.measures import MEASURES, MEMORY
    from app.cli.bench.gateway.run import Plan, measure, ratios
    from app.cli.bench.system import BenchError

    plan = Plan(
        peers=words(peers, PEERS, "bench gateway: --peers"),
        peers_dir=peers_dir,
        rounds=rounds,
        seconds=seconds,
        measures=words(only, (*MEASURES, MEMORY), "bench gateway: --only") or [*MEASURES, MEMORY],
        streams=_numbers(streams),
    )
    try:
        report = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    except BenchError as error:
        raise CliError(f"bench gateway: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(table(report, ratios(plan))))
    if report["gateways"]["hotspare"]["failed"]:
        raise typer.Exit(1)


def _numbers(given: str) -> list[int]:
    words = [word.strip() for word in given.split(",")]
    if not all(word.isdigit() and 0 < int(word) <= 10_000 for word in words):
        raise CliError(
            f"bench gateway: --streams={given}: numbers from 1 to 10000 are needed, comma separated",
            code=ExitCode.BAD_CONFIGURATION,
        )
    return sorted({int(word) for word in words})
