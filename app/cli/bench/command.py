"""``hotspare bench …`` as Typer sees it: options, progress on stderr, the result on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.cli.bench.chaos.command import chaos
from app.cli.bench.failover.command import failover
from app.cli.bench.gateway.command import gateway
from app.cli.bench.loadtest.command import load
from app.cli.bench.recovery.command import recovery, seconds
from app.cli.errors import CliError

MIB = 1024 * 1024
RESUME_SECONDS = (
    ("pause", "silence of the stream"),
    ("teardown", "of which teardown: SIGKILL → lock free"),
    ("prefill", "of which a prefill, as long as that of a new prompt of as many tokens"),
    ("rest", "the rest: promotion, and the way to the resumed answer"),
)
RESUME_PEERS = ("nginx", "vllm-router")

MEMORY: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("attach the weights, 400 tensors", lambda r: seconds(r["attach_seconds"])),
    ("bare mmap and 400 tensors", lambda r: seconds(r["bare_map_seconds"])),
    ("attach ÷ bare", lambda r: f"{r['attach_ratio']:.2f}"),
    ("status", lambda r: seconds(r["status_seconds"])),
    ("echo of the same size through asyncio", lambda r: seconds(r["echo_seconds"])),
    ("status ÷ echo", lambda r: f"{r['status_ratio']:.2f}"),
    ("map and unmap the KV pages", lambda r: seconds(r["kv_map_large_seconds"])),
    ("map and unmap a sixteenth as many", lambda r: seconds(r["kv_map_small_seconds"])),
    ("all ÷ a sixteenth", lambda r: f"{r['kv_map_ratio']:.2f}"),
    ("SIGKILL → weights taken back, hashed", lambda r: seconds(r["adopt_seconds"])),
    ("  of that: the service's start", lambda r: seconds(r["service_start_seconds"])),
    ("checksum", lambda r: f"{r['checksum_gb_per_second']:.1f} GB/s"),
    ("plain copy", lambda r: f"{r['copy_gb_per_second']:.1f} GB/s"),
)


def build() -> typer.Typer:
    """The ``bench`` group."""
    group = typer.Typer(help="Measure: ratios within one run on this machine.", no_args_is_help=True)
    group.command("recovery")(recovery)
    group.command("resume")(_resume)
    group.command("handover")(_handover)
    group.command("gms")(_gms)
    group.command("gateway")(gateway)
    group.command("chaos")(chaos)
    group.command("failover")(failover)
    group.command("load")(load)
    return group


def _resume(
    engine: Annotated[Literal["vllm", "sim"], typer.Option(help="Which engine.")] = "vllm",
    kills: Annotated[int, typer.Option(min=1, max=1000, help="How often the active engine is killed.")] = 10,
    peers: Annotated[str, typer.Option(help="Who else gets the same kills, comma separated: nginx, vllm-router.")] = "",
    peers_dir: Annotated[Path, typer.Option(help="Where `make bench-peers` put the routers.")] = Path(".peers"),
    settle_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds that an engine serves before it is killed.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """How long a stream is silent when its engine is killed, and the parts of that time.

    Ends with 1 if an answer of ours was lost, or another than without a kill. With --peers a C compiler is needed.
    """
    from app.cli.bench.ending import run
    from app.cli.bench.resume import measure
    from app.cli.bench.system import BenchError
    from app.cli.bench.words import words

    names = words(peers, RESUME_PEERS, "bench resume: --peers")
    try:
        report = run(
            measure(
                engine=engine,
                kills=kills,
                say=_say,
                peers=names,
                peers_dir=peers_dir,
                settle_seconds=settle_seconds,
            )
        )
    except BenchError as error:
        raise CliError(f"bench resume: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(_resume_table(report)))
    if report["lost"] or report["wrong"]:
        raise typer.Exit(1)


def _handover(
    engine: Annotated[Literal["vllm", "sim"], typer.Option(help="Which engine.")] = "vllm",
    handovers: Annotated[int, typer.Option(min=1, max=1000, help="How many, one after the other.")] = 20,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Streams at a time.")] = 4,
    tokens: Annotated[int, typer.Option(min=16, max=100_000, help="Tokens of each.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Hand over again and again under streams: how long it takes, and how long streams are silent.

    Ends with 1 if an answer was lost, or another than without hand-overs.
    """
    from app.cli.bench.ending import run
    from app.cli.bench.handover import measure
    from app.cli.bench.system import BenchError

    try:
        report = run(measure(engine=engine, handovers=handovers, streams=streams, tokens=tokens, say=_say))
    except BenchError as error:
        raise CliError(f"bench handover: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        rows = ["| | median | p99 | max |", "| --- | ---: | ---: | ---: |"]
        for name, meaning in (("drain", "asked → the spare serves"), ("pause", "silence of a stream")):
            spread = report[f"{name}_seconds"]
            shown = ("-" if spread[of] is None else seconds(spread[of]) for of in ("median", "p99", "max"))
            rows.append(f"| {meaning} | {' | '.join(shown)} |")
        counts = ("handovers", "streams", "lost", "wrong")
        rows += ["", "| | |", "| --- | ---: |", *(f"| {name} | {report[name]} |" for name in counts)]
        print("\n".join([*rows, *(f"\nproblem: {problem}" for problem in report["problems"])]))
    if report["lost"] or report["wrong"]:
        raise typer.Exit(1)


def _gms(
    weights_mib: Annotated[int, typer.Option(min=16, max=1 << 20, help="Size of the weights.")] = 1024,
    kv_mib: Annotated[int, typer.Option(min=16, max=1 << 20, help="Size of the KV pages.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """What the memory service costs: attaching, status, mapping KV pages, taking pages back, hashing.

    Takes twice the weights' and once the KV pages' size of memory while it runs. Sizes are rounded up to 16 MiB.
    """
    from app.cli.bench.memory import measure
    from app.cli.bench.system import BenchError

    try:
        report = measure(weights_bytes=_bytes(weights_mib), kv_bytes=_bytes(kv_mib), say=_say)
    except BenchError as error:
        raise CliError(f"bench gms: {error}") from error
    if as_json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(["| | |", "| --- | ---: |", *(f"| {what} | {show(report)} |" for what, show in MEMORY)]))


def _bytes(mib: int) -> int:
    return -(-mib // 16) * 16 * MIB


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _resume_table(report: dict[str, Any]) -> list[str]:
    rows = ["| | median | max |", "| --- | ---: | ---: |"]
    for name, meaning in RESUME_SECONDS:
        spread = report[f"{name}_seconds"]
        shown = ("-" if spread[of] is None else seconds(spread[of]) for of in ("median", "max"))
        rows.append(f"| {meaning} | {' | '.join(shown)} |")
    rows += ["", "| | |", "| --- | ---: |", *(f"| {name} | {report[name]} |" for name in ("kills", "lost", "wrong"))]
    if report.get("peers"):
        rows += ["", "| streams of others | killed | whole | wrong | with an error | cut |"]
        rows += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, peer in report.get("peers", {}).items():
        counts = " | ".join(str(peer[count]) for count in ("kills", "whole", "wrong", "error", "cut"))
        rows.append(f"| {name} {peer['version']} | {counts} |")
    rows += [f"\nproblem: {problem}" for problem in report["problems"]]
    rows += [f"\n{name} was left out: {why}" for name, why in report.get("skipped", {}).items()]
    return rows
