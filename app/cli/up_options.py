"""The options of ``hotspare up``, from the command line and from HOTSPARE_ variables; the command line wins.

This one command is parsed with argparse: Typer takes a quarter of a second to import, and nothing can start before the
options are known.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from app.cli.errors import CliError
from app.cli.plan import MAX_PORT, MAX_SHADOWS, PER_PROCESS, UpOptions, ranks_from
from app.cli.variables import KNOWN, PREFIX, meant
from workers.exit_codes import ExitCode

MAX_PODS: Final = 100
_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})
_VARIABLES: Final = {"--api-key": "HOTSPARE_API_KEYS", "--migration-limit": "HOTSPARE_RESUME_LIMIT"}
"""Of the gateway's flags, those that are not called like their variable."""
_SWITCHES: Final = ("gms", "keeper")
_NO_OPTIONS: Final = frozenset({"tensor_parallel_size"})
"""What only a variable says, and the pods judge."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CliError(message, code=ExitCode.BAD_CONFIGURATION)


def parse_up(arguments: Sequence[str], environment: Mapping[str, str]) -> UpOptions:
    """What was asked for, with an absolute run folder.

    Raises:
        CliError: an unknown option, or a bad value; names it, and the variable that it came from.
        SystemExit: help was asked for, and has been printed.
    """
    parser = up_parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise CliError(_unknown(unknown[0], parser), code=ExitCode.BAD_CONFIGURATION)
    values = {**_from_environment(parser, environment), **vars(flags)}
    options = UpOptions(**values)
    if options.engine == "sim" and "model" in vars(flags):
        raise CliError(
            "--model is for --engine vllm: the engine without a model has none; leave one of them out",
            code=ExitCode.BAD_CONFIGURATION,
        )
    absolute = Path(os.path.abspath(options.run_dir))
    return UpOptions(**{**vars(options), "run_dir": absolute, "tensor_parallel_size": ranks_from(environment)})


def up_parser() -> _Parser:
    defaults = UpOptions()
    parser = _Parser(
        prog="hotspare up",
        description="A gateway and its pods on this machine, until Ctrl-C.",
        epilog="Each option can be given as HOTSPARE_NAME; gateway, pods and engines read further HOTSPARE_ variables.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )

    def option(name: str, help: str, *, kind: Callable[[str], Any], **more: Any) -> None:
        default = getattr(defaults, name)
        shown = help if default is None else f"{help} (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=shown, **more)

    option("pods", "how many pods", kind=Whole(1, MAX_PODS), metavar="N")
    option(
        "engine",
        "vllm; sim, which is deterministic and has no model; or another one, as hotspare engines lists them",
        kind=_engine,
        metavar="NAME",
    )
    option("model", "model folder in Hugging Face layout; none: the embedded SmolLM2", kind=Path, metavar="DIR")
    option("host", "where the gateway listens", kind=str)
    option("port", "the gateway's port; 0: any", kind=Whole(0, MAX_PORT))
    option(
        "base_port", "first port of pod 0, the others' follow by tens; 0: any", kind=Whole(0, MAX_PORT), metavar="PORT"
    )
    option("run_dir", "folder for sockets, locks and logs", kind=Path, metavar="DIR")
    option("shadows", f"spare engines of each pod, up to {MAX_SHADOWS}", kind=Whole(0, MAX_SHADOWS), metavar="N")
    parser.add_argument(
        "--gms", action=argparse.BooleanOptionalAction, help="a memory service in each pod (default: true)"
    )
    parser.add_argument(
        "--keeper", action=argparse.BooleanOptionalAction, help="fork engines from a warm parent (default: true)"
    )
    return parser


def _from_environment(parser: _Parser, environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in vars(UpOptions()).keys() - _NO_OPTIONS:
        variable = f"HOTSPARE_{name.upper()}"
        given = environment.get(variable, "")
        if not given:
            continue
        if name in _SWITCHES:
            values[name] = _switch(variable, given)
            continue
        try:
            parser.parse_args([f"--{name.replace('_', '-')}={given}"], namespace := argparse.Namespace())
        except CliError as error:
            raise CliError(f"{variable}={given}: {error}", code=error.code) from error
        values.update(vars(namespace))
    return values


def _switch(variable: str, given: str) -> bool:
    if given.lower() in _TRUE | _FALSE:
        return given.lower() in _TRUE
    raise CliError(f"{variable}={given}: should be true or false", code=ExitCode.BAD_CONFIGURATION)


def _engine(text: str) -> str:
    """argparse's ``type``; what is nearly always asked for is known without a look at what is installed."""
    if text not in ("vllm", "sim"):
        from workers.engine import EngineConfigError
        from workers.engines.catalogue import find

        try:
            find(text)
        except EngineConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


@dataclass(frozen=True)
class Whole:
    """Reads a whole number within bounds; argparse's ``type``."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        if not text.isascii() or not text.isdigit() or not self.least <= int(text) <= self.most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {self.least} to {self.most}")
        return int(text)


def _unknown(argument: str, parser: _Parser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; see hotspare up --help"
    name = argument.partition("=")[0]  # what follows may be a secret
    variable = _VARIABLES.get(name, PREFIX + name.lstrip("-").replace("-", "_").upper())
    if variable in KNOWN - PER_PROCESS:
        return f"unknown option {name}: what up starts reads its settings from the environment; set {variable}"
    known = {other.lstrip("-"): other for action in parser._actions for other in action.option_strings}
    near = [known[other] for other in meant(name.lstrip("-"), known)]
    return f"unknown option {name}; " + (f"did you mean {' or '.join(near)}?" if near else "see hotspare up --help")
