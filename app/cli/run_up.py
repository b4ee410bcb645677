"""The order in which ``hotspare up`` does things: check, claim, start, and only then import what it takes to watch.

A start is what people wait for. The children need about a second of both cores for their imports, so this process stays
out of their way until they run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Final

from app.cli.claim import RunDirClaim
from app.cli.environment import refuse_unknown
from app.cli.errors import CliError
from app.cli.plan import PER_PROCESS, PodPlan, UpOptions, gateway_arguments, limits_from, pod_arguments
from app.cli.ports import assign_ports
from app.cli.starter import Starter
from app.cli.variables import KNOWN, OTHER_NAMES, PREFIX
from workers.exit_codes import ExitCode
from workers.lifeline import ParentGone, die_with_parent

_OWN: Final = {
    "RUN_DIR",
    "PODS",
    "ENGINE",
    "MODEL",
    "HOST",
    "PORT",
    "BASE_PORT",
    "SHADOWS",
    "GMS",
    "KEEPER",
    "PARENT_PID",
}
SET_BY_PEOPLE: Final = (KNOWN | OTHER_NAMES) - {f"{PREFIX}{name}" for name in _OWN} - PER_PROCESS
"""Variables that gateway, pods and engines read, and that are no options of this command."""


def run_up(options: UpOptions, environment: Mapping[str, str], *, began: float) -> int:
    """Start everything, and stay until it ends; returns the exit code. ``began``: when, by the monotonic clock.

    Raises:
        CliError: something does not fit, or a process ended by itself; nothing runs any more.
    """
    refuse_unknown(environment, not_suggested=PER_PROCESS)
    _check_model(options)
    _die_with_parent(environment)
    early: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: early.append(number))
    with ExitStack() as stack:
        claim = stack.enter_context(RunDirClaim(options.run_dir))
        port, pods = assign_ports(options, stack)
        _check_settings(options, environment, port, pods)
        claim.rotate_logs({"gateway", "model", *(pod.name for pod in pods)})
        starter = Starter(options, port=port, pods=pods, logs=claim.logs, environment=environment)
        stack.callback(claim.sweep, [pod.name for pod in pods])
        stack.callback(starter.close)
        starter.start()
        claim.keep_logs = True
        try:
            import asyncio

            return asyncio.run(_watch(options, starter, claim, environment, early, began))
        except CliError as error:
            claim.keep_logs = error.code != ExitCode.BAD_CONFIGURATION  # the sentence says it all
            raise


def _check_settings(options: UpOptions, environment: Mapping[str, str], port: int, pods: list[PodPlan]) -> None:
    """What gateway, pods and engines would refuse, said before any of them runs. Where no variable is set there is
    nothing to find out: the options have been checked, and the imports that this takes cost a start a third of a
    second."""
    if not any(name.upper() in SET_BY_PEOPLE and value for name, value in environment.items()):
        return
    from app.arguments import read_settings as read_gateway
    from app.start_error import StartError
    from workers.__main__ import parsers, read_settings
    from workers.settings import SettingsError

    try:
        with _as_children_see_it():
            read_gateway(gateway_arguments(options, port, pods))
            # The others differ in their name and ports.
            read_settings(parsers()[""].parse_args(["pod", *pod_arguments(options, pods[0])]))
    except (StartError, SettingsError) as error:
        raise CliError(str(error), code=ExitCode.BAD_CONFIGURATION) from error


@contextmanager
def _as_children_see_it() -> Iterator[None]:
    """Settings are read from the environment, and what each process is told on its own is no part of theirs."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.upper() in PER_PROCESS}
    try:
        yield
    finally:
        os.environ.update(kept)


def _check_model(options: UpOptions) -> None:
    """vLLM would find the same out after half a minute of imports."""
    if options.engine != "vllm" or options.model is None:
        return
    if not options.model.is_dir():
        found = "is a file" if options.model.exists() else "does not exist"
        problem = f"the model folder {options.model} {found}"
    elif not (options.model / "config.json").is_file():
        problem = f"the folder {options.model} holds no config.json, so it is no model in Hugging Face layout"
    else:
        return
    raise CliError(
        f"{problem}; name another with --model or HOTSPARE_MODEL, or neither for the embedded SmolLM2",
        code=ExitCode.BAD_CONFIGURATION,
    )


def _die_with_parent(environment: Mapping[str, str]) -> None:
    """Whoever starts ``up`` from a program may want it to end with that program, as ``up`` wants of its children."""
    given = environment.get("HOTSPARE_PARENT_PID", "")
    if not given:
        return
    try:
        die_with_parent(int(given))
    except (ValueError, ParentGone) as error:
        raise CliError(
            f"HOTSPARE_PARENT_PID={given} is not the process that started this one ({error}); unset it",
            code=ExitCode.BAD_CONFIGURATION,
        ) from error


async def _watch(
    options: UpOptions,
    starter: Starter,
    claim: RunDirClaim,
    environment: Mapping[str, str],
    early: list[int],
    began: float,
) -> int:
    from app.cli.screen import open_screen
    from app.cli.up import Up

    with closing(open_screen()) as screen:
        up = Up(
            options,
            starter,
            screen=screen,
            limits=limits_from(environment),
            began=began,
            environment=environment,
            claim=claim,
        )
        return await up.run(early)
