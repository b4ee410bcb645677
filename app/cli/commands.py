"""The commands of ``hotspare`` as Typer sees them: options and help here, work in the modules they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.errors import CliError
from app.cli.launch import PASSED_ON, UP_HELP
from workers.exit_codes import ExitCode

RunDir = Annotated[
    Path,
    typer.Option("--run-dir", envvar="HOTSPARE_RUN_DIR", help="Folder of this machine's pods: sockets, locks, logs."),
]
FaultName = Literal["kill-active", "kill-shadow", "kill-gms", "stop-active"]

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
    """The application. ``pretty`` help and the benchmarks cost imports that the other commands need not pay for."""
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
) -> int:
    """Pods, engines, roles, memory, and how the gateway sees them.

    The exit code is 1 when no pod has a file in the run folder, or when neither a gateway nor an engine answers.
    """
    from app.cli.show import show_status, watch_status

    if as_json and watch:
        raise CliError("--json prints one document and --watch goes on: choose one", code=ExitCode.BAD_CONFIGURATION)
    if watch:
        return watch_status(_absolute(run_dir))
    return show_status(_absolute(run_dir), as_json=as_json)


def _fault(
    what: Annotated[FaultName, typer.Argument(help="What to break.")],
    pod: Annotated[str, typer.Argument(help="In which pod, e.g. pod-0.")],
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> int:
    """Break one process of a pod on purpose: SIGKILL, or SIGSTOP for stop-active."""
    from app.cli.fault import Fault, inject

    print(inject(Fault(what), pod, _absolute(run_dir)))
    return ExitCode.DRAINED


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
