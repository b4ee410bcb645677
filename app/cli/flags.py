"""Flags that a process does not have: told with those that may have been meant, before the process is started.

Each process parses its own flags; but the names of all settings are here, so here a typing mistake can be told. A look
at the table of names costs nothing; the parsers, which import the settings, are asked only where it has no such
name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from app.cli.errors import CliError
from app.cli.variables import KNOWN, PREFIX, meant
from workers.exit_codes import ExitCode

_OTHERS: Final = frozenset({"--help", "--api-key", "--migration-limit"})
"""Flags that are not called like a variable."""


def refuse_unknown_flags(command: str, arguments: Sequence[str]) -> None:
    """Look for flags that ``command`` does not have, and no other process either.

    Raises:
        CliError: there is one; names those that may have been meant.
    """
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--"]
    cheap = _named_like_variables()
    if all(name in cheap for name in given):
        return
    from app.cli.meanings import Process, parser_of

    flags = {flag for action in parser_of(Process(command))._actions for flag in action.option_strings}
    for name in given:
        if name not in flags:
            raise CliError(_sentence(command, name, flags), code=ExitCode.BAD_CONFIGURATION)


def _named_like_variables() -> Collection[str]:
    return _OTHERS.union(flag for variable in KNOWN for flag in _flags_of(variable.removeprefix(PREFIX)))


def _flags_of(variable: str) -> Iterator[str]:
    """The flag of a variable, or of a switch, and that of one of the memory service's."""
    for name in (variable, variable.removeprefix("GMS_")):
        words = name.lower().replace("_", "-")
        yield from (f"--{words}", f"--no-{words}")


def _sentence(command: str, name: str, flags: Collection[str]) -> str:
    known = {flag.lstrip("-"): flag for flag in flags}
    near = [known[other] for other in meant(name.lstrip("-"), known)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"see hotspare {command} --help"
    return f"unknown option {name}; {hint}"
