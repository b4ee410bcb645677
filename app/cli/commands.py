"""The commands of ``hotspare`` as Typer sees them: options and help here, work in the modules they name."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.errors import CliError
from app.cli.launch import PASSED_ON, UP_HELP
from workers.exit_codes import ExitCode
from workers.handover import MAX_WAIT_SECONDS, WAIT_SECONDS, Asked

RunDir = Annotated[
    Path,
    typer.Option("--run-dir", envvar="HOTSPARE_RUN_DIR", help="Folder of this machine's pods: sockets, locks, logs."),
]
FaultName = Literal["kill-active", "kill-shadow", "kill-gms", "stop-active", "stop-shadow", "stop-gms"]

DEFAULT_RUN_DIR = Path(".hotspare")


def run(arguments: list[str]) -> int:
    """Carry out one command line; returns the exit code.

    Raises:
        CliError: what was asked for cannot be done.
    """
    pretty = not arguments or "--help" in arguments
    try:
        code = build(pretty=pretty, with_bench=pretty or arguments[0] == "bench")(
            args=arguments, prog_name="hotspare", standalone_mode=True
        )
    except SystemExit as done:
        code = done.code
    return code if isinstance(code, int) else ExitCode.DRAINED


def build(*, pretty: bool, with_bench: bool) -> typer.Typer:
    """The application. ``pretty`` help and the benchmarks cost imports that the other commands need not pay for.

    Commands return nothing: Typer drops it, and ends with 0. Another exit code is raised, as CliError or typer.Exit.
    """
    app = typer.Typer(
        name="hotspare",
        help="OpenAI-compatible gateway over worker pods whose engines fail over to a hot spare.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if pretty else None,
    )
    app.callback()(_root)
    app.command("status")(_status)
    app.command("fault")(_fault)
    app.command("handover")(_handover)
    app.command("engines")(_engines)
    app.command("conformance")(_conformance)
    if with_bench:
        from app.cli.bench.command import build as build_bench

        app.add_typer(build_bench(), name="bench")
    for name, line in {"up": UP_HELP, **{name: passed.help for name, passed in PASSED_ON.items()}}.items():
        # For the list in --help: main() has these carried out without Typer.
        app.command(name, help=line, rich_help_panel="Processes")(_passed_on)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"hotspare {version('hotspare')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _passed_on() -> None:
    raise CliError("name this command first: its own options come after it", code=ExitCode.BAD_CONFIGURATION)


def _status(
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again each second, until Ctrl-C.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="What each process costs, and what they share.")] = False,
) -> None:
    """Pods, engines, roles, memory, and how the gateway sees them.

    The exit code is 1 when neither a pod nor a gateway has a file in the run folder, or when nobody answers.
    """
    from app.cli.show import show_memory, show_status, watch_status

    if as_json and watch:
        raise CliError("--json prints one document and --watch goes on: choose one", code=ExitCode.BAD_CONFIGURATION)
    if memory and watch:
        raise CliError("--memory is shown once: leave --watch out", code=ExitCode.BAD_CONFIGURATION)
    if memory:
        show_memory(_absolute(run_dir), as_json=as_json)
    elif watch:
        watch_status(_absolute(run_dir))
    else:
        show_status(_absolute(run_dir), as_json=as_json)


def _fault(
    what: Annotated[FaultName, typer.Argument(help="What to break.")],
    pod: Annotated[str, typer.Argument(help="In which pod, e.g. pod-0.")],
    run_dir: RunDir = DEFAULT_RUN_DIR,
    device: Annotated[
        str | None,
        typer.Option(help="Whose memory service, of a pod with one for each rank, e.g. cpu:1. [default: the first]"),
    ] = None,
) -> None:
    """Break one process of a pod on purpose: SIGKILL, or SIGSTOP for stop-…."""
    from app.cli.fault import Fault, inject

    print(inject(Fault(what), pod, _absolute(run_dir), device=device))


def _engines(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The engines that --engine can name here."""
    from app.cli.engines import show_engines

    show_engines(as_json=as_json)


def _conformance(
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", envvar="HOTSPARE_ENGINE", help="Its name, as hotspare engines lists it, or module:Class."
        ),
    ] = None,
    gms: Annotated[
        bool | None,
        typer.Option("--gms/--no-gms", help="Over a memory service, started for it. [default: as HOTSPARE_GMS]"),
    ] = None,
    initialize_seconds: Annotated[
        float, typer.Option(min=1, max=86400, metavar="SECONDS", help="How long its initialize() may take.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Drive one engine through its life, and say which promises of the engine protocol it keeps.

    All other settings of an engine are read from the environment. The exit code is 1 if a promise is broken, and 2 if
    the engine cannot be tried at all. What takes long is named on standard error meanwhile. docs/engines.md has the
    promises.
    """
    from app.cli.conformance.command import run as run_conformance

    raise typer.Exit(run_conformance(engine=engine, gms=gms, as_json=as_json, initialize_seconds=initialize_seconds))


def _handover(
    pod: Annotated[
        str | None,
        typer.Argument(envvar="HOTSPARE_POD", help="Of which pod, e.g. pod-0. [default: the only one there]"),
    ] = None,
    restart_keepers: Annotated[
        bool,
        typer.Option(
            "--restart-keepers",
            help="Replace every engine of the pod, and its keeper, by one of the code that is installed now.",
        ),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_WAIT_SECONDS,
            metavar="SECONDS",
            help="Time for requests that no other engine could resume. Then the hand-over is called off.",
        ),
    ] = WAIT_SECONDS,
    cut: Annotated[bool, typer.Option("--cut", help="Cut them then, instead.")] = False,
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Have the spare of a pod take over from its active engine, which starts again: no answer is lost.

    Requests that no other engine could resume are waited for, and named meanwhile. Ends with 1 and the reason if
    the active engine serves on.
    """
    asked, progress = Asked(wait_seconds=wait, cut=cut), partial(print, file=sys.stderr, flush=True)
    if restart_keepers:
        from app.cli.roll import roll

        roll(pod, _absolute(run_dir), asked, say=partial(print, flush=True), progress=progress)
        return
    from app.cli.handover import hand_over

    print(hand_over(pod, _absolute(run_dir), asked, progress=progress))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
