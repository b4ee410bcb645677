"""``hotspare``: the first look at the command line, before anything heavy is imported.

The long-running processes are commands of their own packages. For those, ``hotspare`` only puts the right program in
its own place, so that pids, signals and exit codes are the process's own and nothing of the command line stays. ``up``
is in a hurry and parses its options itself; all else is Typer's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from app.cli.environment import refuse_unknown
from app.cli.errors import CliError
from app.cli.flags import refuse_unknown_flags
from app.cli.launch import PASSED_ON, module_command, safe_environment
from app.processes.stop_signals import hold


def main() -> int:
    """Entry point of the console script; returns the exit code."""
    began = time.monotonic()
    arguments = sys.argv[1:]
    command = arguments[0] if arguments else ""
    if command in PASSED_ON:
        hold()  # the process that follows goes on holding them, until it hears them
    try:
        if command in PASSED_ON:
            if {"-h", "--help"}.intersection(arguments):
                from app.cli.help import print_help

                return print_help(command)
            refuse_unknown(os.environ)
            refuse_unknown_flags(command, arguments[1:])
            pass_on(command, arguments[1:])
        if command == "up":
            from app.cli.run_up import run_up
            from app.cli.up_options import parse_up

            return run_up(parse_up(arguments[1:], os.environ), os.environ, began=began)
        if not command.startswith("-"):
            refuse_unknown(os.environ)
        from app.cli.commands import run

        return run(arguments)
    except CliError as error:
        with contextlib.suppress(OSError):  # nobody reads it: the exit code says enough
            print(f"hotspare {command}: {_shown(error)}", file=sys.stderr)
        return error.code


def _shown(error: CliError) -> str:
    """It may quote what a process, or one of its libraries, has said."""
    from gms.legible import on_terminal

    return on_terminal(str(error)) if sys.stderr.isatty() else str(error)


def pass_on(command: str, arguments: list[str]) -> None:
    """Become the process that ``command`` names. Does not return."""
    sys.stdout.flush()
    program = [*module_command(*PASSED_ON[command].module), *arguments]
    os.execve(program[0], program, safe_environment(os.environ))  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(main())
