"""``hotspare bench failover`` as Typer sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.bench.words import words
from app.cli.errors import CliError
from workers.exit_codes import ExitCode

if TYPE_CHECKING:
    from app.cli.bench.failover.scale import Plan

_ARMS = ("cold", "shadow", "shadow_carry")


def failover(
    engine: Annotated[
        Literal["sim", "vllm"], typer.Option(help="sim: with a simulated accelerator; vllm: with what there is.")
    ] = "sim",
    scale: Annotated[
        Literal["short", "full"], typer.Option(help="short: sped up, under three minutes; full: in real time, 36.")
    ] = "short",
    arms: Annotated[str, typer.Option(help=f"Which ones, comma separated, of {', '.join(_ARMS)}.")] = ",".join(_ARMS),
    rate: Annotated[float | None, typer.Option(min=0.001, max=1000, help="Requests a second.")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Tokens of each prompt.")] = None,
    answer: Annotated[int | None, typer.Option(min=2, max=1_000_000, help="Tokens of each answer.")] = None,
    settle: Annotated[float | None, typer.Option(min=1, max=86400, help="Seconds of load before the kill.")] = None,
    observe: Annotated[float | None, typer.Option(min=1, max=86400, help="Seconds of load after the kill.")] = None,
    restart: Annotated[
        float | None, typer.Option(min=0, max=3600, help="Seconds that an engine of sim takes to start again.")
    ] = None,
    ttft_limit: Annotated[
        float | None, typer.Option(min=0.001, max=3600, help="Seconds until the first token that are good enough.")
    ] = None,
    rate_limit: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Tokens a second of a user that are good enough.")
    ] = None,
    speed: Annotated[float | None, typer.Option(min=1, max=1000, help="How many times as fast (sim).")] = None,
    group: Annotated[int | None, typer.Option(min=1, max=1000, help="How many tokens one stands for (sim).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with plots there.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary there.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the plots there, as SVG.")] = None,
    again: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: write pages and pictures of the JSON in this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Two workers under load, one of which loses its engine: a cold restart against a shadow, without and with its KV
    cache. All figures are given as if nothing were sped up. docs/failover.md.

    Ends with 1 if a request was lost, or a worker did not come back.
    """
    from app.cli.bench.failover import page
    from app.cli.bench.failover.scale import plan_of

    names = words(arms, _ARMS, "bench failover: --arms")
    if engine == "vllm" and any(value is not None for value in (speed, group, restart)):
        message = (
            "bench failover: --speed, --group and --restart are for --engine sim: no other one's time is simulated"
        )
        raise CliError(message, code=ExitCode.BAD_CONFIGURATION)
    plan = plan_of(
        engine,
        scale,
        requests_per_second=rate,
        prompt_tokens=prompt,
        answer_tokens=answer,
        settle_seconds=settle,
        observe_seconds=observe,
        restart_seconds=restart,
        ttft_limit_seconds=ttft_limit,
        rate_limit=rate_limit,
        speed=speed,
        group=group,
    )
    found = _measured(plan, names) if again is None else _read(again)
    for path, write in ((report, page.page), (markdown, page.markdown), (picture, page.image)):
        if path is not None:
            path.write_text(write(found))
    print(_json(found) if as_json else page.markdown(found))
    if found["lost"] or found["broken"]:
        raise typer.Exit(1)


def _measured(plan: Plan, names: list[str]) -> dict[str, Any]:
    from app.cli.bench.ending import run
    from app.cli.bench.failover.run import measure
    from app.cli.bench.system import BenchError

    try:
        return run(measure(plan, names, _say))
    except BenchError as error:
        raise CliError(f"bench failover: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """The report of an earlier run: the last line of what was printed.

    Raises:
        CliError: it is none.
    """
    import msgspec

    try:
        report: dict[str, Any] = msgspec.json.decode(path.read_bytes().splitlines()[-1])
        report["plan"], report["arms"]
    except (OSError, IndexError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise CliError(
            f"bench failover: --from {path}: not the JSON of a run ({error})", code=ExitCode.BAD_CONFIGURATION
        ) from error
    return report


def _json(report: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(report).decode()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
