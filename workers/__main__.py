"""``python -m workers engine|pod``: the worker's processes. Flags are the settings' names with dashes; flags win."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from pydantic_settings import BaseSettings

from workers.exit_codes import ExitCode
from workers.first_process import end_when_told
from workers.lifeline import ParentGone, die_with_parent
from workers.limits import ENGINE_FILES, POD_FILES, too_few_files
from workers.logs import configure_logging
from workers.pod_commands import admin_ports, engine_settings
from workers.settings import SECRET, EngineSettings, PodSettings, SettingsError, WorkerSettings, load_settings

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code (contracts: ``workers.exit_codes``)."""
    made = parsers()
    parsed, unknown = made[""].parse_known_args(argv)
    command = parsed.command
    if unknown:  # of its command, and not of the parser above all of them
        made[command].error(f"unrecognized arguments: {' '.join(name.partition('=')[0] for name in unknown)}")
    try:
        settings = read_settings(parsed)
    except SettingsError as error:
        print(f"hotspare {command}: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIGURATION
    if problem := too_few_files(POD_FILES if command == "pod" else ENGINE_FILES):
        print(f"hotspare {command}: {problem}", file=sys.stderr)
        return ExitCode.BAD_CONFIGURATION
    configure_logging(form=settings.log_format, level=settings.log_level)
    end_when_told()
    try:
        die_with_parent(settings.parent_pid)
    except ParentGone as error:
        logger.error("%s; ending with it", error)
        return ExitCode.FORCED
    # What this process starts is tied to this process, not to its parent.
    os.environ.pop("HOTSPARE_PARENT_PID", None)
    if isinstance(settings, PodSettings):
        import asyncio

        from workers.pod import run_pod

        return asyncio.run(run_pod(settings))
    if isinstance(settings, EngineSettings):
        from workers.factory import run_engine_process

        return run_engine_process(settings)
    raise AssertionError(f"no such command: {command}")


def read_settings(parsed: argparse.Namespace) -> WorkerSettings:
    """The settings of a command line (``parsers``): flags over environment. A pod's are refused for what its engines
    would refuse, once and now, and not by each engine that is started in vain.

    Raises:
        SettingsError: a value does not fit.
    """
    flags = {name: value for name, value in vars(parsed).items() if value is not None}
    if flags.pop("command") != "pod":
        return load_settings(EngineSettings, flags)
    settings = load_settings(PodSettings, flags)
    for name in admin_ports(settings):
        engine_settings(settings, name)
    return settings


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of the whole command line under "", and those of its commands by their names. ``hotspare pod --help``
    explains the flags more fully, from the docstrings of the settings."""
    parser = argparse.ArgumentParser(prog="hotspare", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    made = {"": parser}
    for name, text, settings in (
        ("engine", "A keeper and the engine that it forks.", EngineSettings),
        ("pod", "The supervisor of one pod on this machine: a memory service and its engines.", PodSettings),
    ):
        made[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        _add_flags(made[name], settings)
    return made


def _add_flags(parser: argparse.ArgumentParser, settings: type[BaseSettings]) -> None:
    for name, field in settings.model_fields.items():
        if name in ("sim", "parent_pid", *SECRET):
            continue  # the environment only: HOTSPARE_SIM_*, what a supervisor sets, and secrets
        options: dict[str, Any] = {"metavar": name.upper()}
        if field.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        options |= {"dest": name, "default": None, "help": f"overrides HOTSPARE_{name.upper()}"}
        parser.add_argument(f"--{name.replace('_', '-')}", **options)


if __name__ == "__main__":
    sys.exit(main())
