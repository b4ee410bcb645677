"""``hotspare bench …`` as Typer sees it: options, progress on stderr, the result on stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from app.cli.bench.gateway.command import gateway
from app.cli.errors import CliError

MIB = 1024 * 1024
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

MEMORY: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("attach the weights, 400 tensors", lambda r: _seconds(r["attach_seconds"])),
    ("bare mmap and 400 tensors", lambda r: _seconds(r["bare_map_seconds"])),
    ("attach ÷ bare", lambda r: f"{r['attach_ratio']:.2f}"),
    ("status", lambda r: _seconds(r["status_seconds"])),
    ("echo of the same size through asyncio", lambda r: _seconds(r["echo_seconds"])),
    ("status ÷ echo", lambda r: f"{r['status_ratio']:.2f}"),
    ("map and unmap the KV pages", lambda r: _seconds(r["kv_map_large_seconds"])),
    ("map and unmap a sixteenth as many", lambda r: _seconds(r["kv_map_small_seconds"])),
    ("all ÷ a sixteenth", lambda r: f"{r['kv_map_ratio']:.2f}"),
    ("SIGKILL → weights taken back, hashed", lambda r: _seconds(r["adopt_seconds"])),
    ("  of that: the service's start", lambda r: _seconds(r["service_start_seconds"])),
    ("checksum", lambda r: f"{r['checksum_gb_per_second']:.1f} GB/s"),
    ("plain copy", lambda r: f"{r['copy_gb_per_second']:.1f} GB/s"),
)


def build() -> typer.Typer:
    """The ``bench`` group."""
    group = typer.Typer(help="Measure: ratios within one run on this machine.", no_args_is_help=True)
    group.command("recovery")(_recovery)
    group.command("gms")(_gms)
    group.command("gateway")(gateway)
    return group


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
    if abs(value) < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.2f} s"
