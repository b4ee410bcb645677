"""``hotspare gateway|pod|engine|gms --help``: each flag with its variable, its meaning and its default."""

from __future__ import annotations

from typing import Final

from app.cli.meanings import Process, Setting, parser_of, settings_of

EPILOG: Final = (
    "Each flag can be given as an environment variable, in brackets above. docs/settings.md lists these, and those "
    "that have no flag."
)


def print_help(command: str) -> int:
    """Print the help of a process; returns the exit code."""
    print(help_text(Process(command)), end="")
    return 0


def help_text(process: Process) -> str:
    parser = parser_of(process)
    settings = settings_of(process)
    for action in parser._actions:
        if setting := settings.get(action.dest):
            action.help = _line(setting).replace("%", "%%")
    parser.epilog = EPILOG
    return parser.format_help()


def _line(setting: Setting) -> str:
    text = setting.meaning.replace("``", "")
    default = f" (default: {setting.default})" if setting.default else ""
    return f"{text}{default} [{', '.join(setting.variables)}]"
