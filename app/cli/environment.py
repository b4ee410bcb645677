"""HOTSPARE_ variables that nobody reads: a typing mistake there would otherwise be a setting that does nothing.

Every process ignores the variables of the others, so only the command above them all can tell which are unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from app.cli.errors import CliError
from app.cli.plan import PER_PROCESS, UpOptions
from workers.exit_codes import ExitCode

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

PREFIX: Final = "HOTSPARE_"

UP_NAMES: Final = frozenset({*(f"{PREFIX}{field.name.upper()}" for field in fields(UpOptions)), "HOTSPARE_PARENT_PID"})
"""Read by ``hotspare up`` itself."""


def refuse_unknown(environment: Mapping[str, str]) -> None:
    """Look for HOTSPARE_ variables that no process knows.

    Raises:
        CliError: there is one; names it, and the nearest known name.
    """
    # Names as pydantic-settings compares them: without case.
    given = {name.upper(): name for name in environment if name.upper().startswith(PREFIX)}
    if not given.keys() - UP_NAMES - PER_PROCESS:
        return  # importing all settings costs 0.3 s, which a start without variables need not pay
    known = known_names()
    sentences = [_sentence(given[name], known) for name in sorted(given.keys() - known)]
    if sentences:
        raise CliError("; ".join(sentences), code=ExitCode.BAD_CONFIGURATION)


def known_names() -> frozenset[str]:
    """Every variable that some process of the project reads."""
    from app.settings import GatewaySettings
    from gms.settings import GmsSettings
    from workers.settings import EngineSettings, PodSettings, SimSettings

    settings = (GatewaySettings, EngineSettings, PodSettings, SimSettings, GmsSettings)
    return UP_NAMES | PER_PROCESS | {name for one in settings for name in names_of(one)}


def names_of(settings: type[BaseSettings]) -> Iterable[str]:
    """The variables that fill the fields of ``settings``, aliases included."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    for field, info in settings.model_fields.items():
        if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
            continue  # settings of their own, with names of their own
        alias = info.validation_alias
        if alias is None or settings.model_config.get("populate_by_name"):
            yield f"{prefix}{field}".upper()
        for name in [alias] if isinstance(alias, str) else getattr(alias, "choices", ()):
            if isinstance(name, str):
                yield name.upper()


def _sentence(name: str, known: Iterable[str]) -> str:
    candidates = {other.removeprefix(PREFIX): other for other in sorted(set(known) - PER_PROCESS)}
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), candidates, n=1)
    hint = (
        f"did you mean {candidates[near[0]]}?"
        if near
        else "unset it, or see the documentation for the names that exist"
    )
    return f"the environment variable {name} is unknown to hotspare: {hint}"
