"""``hotspare conformance``: the terminal's side."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Final, TextIO

import msgspec

from app.cli.conformance.checks import Check
from app.cli.conformance.lives import lives
from app.cli.conformance.outcomes import Report, Result, row, summary
from app.cli.conformance.run import CannotTry, Patience, conform
from app.cli.errors import CliError
from workers.exit_codes import ExitCode
from workers.settings import EngineSettings, SettingsError, load_settings

MIN_PROGRESS_SECONDS: Final = 0.5
"""Between two lines about what is waited for."""


def run(*, engine: str | None, gms: bool | None, as_json: bool, initialize_seconds: float) -> int:
    """Returns 0 if every promise is kept, 1 if one is broken. ``engine`` and ``gms`` None: as ``HOTSPARE_ENGINE`` and
    ``HOTSPARE_GMS`` say. What is waited for is said on standard error.

    Raises:
        CliError: the engine cannot be tried; exit code 2.
    """
    flags = {name: value for name, value in (("engine", engine), ("gms", gms)) if value is not None}
    try:
        settings = load_settings(EngineSettings, flags)
    except SettingsError as error:
        raise CliError(str(error), code=ExitCode.BAD_CONFIGURATION) from error
    # What an engine says while it is tormented is for those who ask for it.
    level = settings.log_level.upper() if "log_level" in settings.model_fields_set else "CRITICAL"
    logging.basicConfig(level=level, stream=sys.stderr, force=True)
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)  # servers set their own loggers' levels
    with _own_output() as output:
        tried = lives(initialize_seconds=initialize_seconds)
        width = max(len(check.name) for life in tried for check in life.checks)
        every = min(Patience().progress_seconds, max(MIN_PROGRESS_SECONDS, initialize_seconds / 3))

        def heard(result: Result) -> None:
            if not as_json:
                print(row(result, width=width), file=output, flush=True)

        try:
            report = conform(
                settings,
                heard=heard,
                waits=_say_what_is_waited_for,
                lives=tried,
                patience=Patience(progress_seconds=every),
            )
        except CannotTry as error:
            raise CliError(str(error), code=ExitCode.BAD_CONFIGURATION) from error
        print(_last(report, as_json=as_json), file=output)
    return report.exit_code


def _say_what_is_waited_for(check: Check, seconds: float) -> None:
    print(
        f"waiting for {check.name} ({check.promise}), for {seconds:.0f} s of {check.seconds:g} s",
        file=sys.stderr,
        flush=True,
    )


def _last(report: Report, *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(report).decode()
    return f"{summary(report)}\nwarning: {report.caveat}" if report.caveat else summary(report)


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """Standard output for the report alone: what engines and their libraries print goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
