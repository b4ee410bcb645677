"""What the settings classes say about themselves, for ``--help`` and for docs/settings.md: names, defaults, meanings.

Meanings are the attribute docstrings, read from the source. pydantic could do that (``use_attribute_docstrings``), at
the price of 20 to 30 ms in each start of each process; only who asks for help should pay.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import dedent
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from app.settings import GatewaySettings
from gms.settings import GmsSettings
from workers.settings import EngineSettings, PodSettings, SimSettings


class Process(StrEnum):
    """A process with settings of its own, by its command."""

    GATEWAY = "gateway"
    POD = "pod"
    ENGINE = "engine"
    GMS = "gms"


CLASSES: Final[dict[Process, type[BaseSettings]]] = {
    Process.GATEWAY: GatewaySettings,
    Process.POD: PodSettings,
    Process.ENGINE: EngineSettings,
    Process.GMS: GmsSettings,
}
NESTED: Final = "sim"
"""The field of EngineSettings that is a settings class, with variables and no flags."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of one process; texts as people read them."""

    variables: tuple[str, ...]
    """The first is the usual one."""
    flag: str
    """"" if there is none."""
    default: str
    """"" if it has none, or makes one anew each time."""
    meaning: str


def parser_of(process: Process) -> argparse.ArgumentParser:
    """The process's own parser."""
    match process:
        case Process.GATEWAY:
            from app.__main__ import parser as gateway_parser

            return gateway_parser()
        case Process.GMS:
            from gms.__main__ import parser as gms_parser

            return gms_parser()
        case Process.POD | Process.ENGINE:
            from workers.__main__ import parsers

            return parsers()[process]


def settings_of(process: Process) -> dict[str, Setting]:
    """Field name → setting, without nested settings."""
    actions = {action.dest: action for action in parser_of(process)._actions}
    flags = {name: " / ".join(action.option_strings) for name, action in actions.items()}
    return _settings(CLASSES[process], flags)


def sim_settings() -> dict[str, Setting]:
    """Those of the sim engine."""
    return _settings(SimSettings, {})


def _settings(cls: type[BaseSettings], flags: dict[str, str]) -> dict[str, Setting]:
    texts = docstrings(cls)
    return {
        name: Setting(
            variables=_variables(cls, name, field),
            flag=flags.get(name, ""),
            default=_default(field),
            meaning=texts.get(name, ""),
        )
        for name, field in cls.model_fields.items()
        if name != NESTED
    }


def docstrings(cls: type) -> dict[str, str]:
    """Attribute → the string below it, as one line; those of base classes, too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, BaseSettings) or base is BaseSettings:
            continue
        (definition,) = ast.parse(dedent(inspect.getsource(base))).body
        if not isinstance(definition, ast.ClassDef):
            raise TypeError(f"{base} is no class in its source")
        for line, following in zip(definition.body, definition.body[1:], strict=False):
            match line, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _variables(cls: type[BaseSettings], name: str, field: FieldInfo) -> tuple[str, ...]:
    alias = field.validation_alias
    if alias is None:
        return (f"{cls.model_config.get('env_prefix', '')}{name}".upper(),)
    names = [alias] if isinstance(alias, str) else getattr(alias, "choices", [])
    return tuple(other for other in names if isinstance(other, str) and other.isupper())


def _default(field: FieldInfo) -> str:
    match field.default:
        case bool(value):
            return "yes" if value else "no"
        case tuple(values):
            return ",".join(map(str, values))
        case str() | int() | float() | Path() as value:
            return f"{value:g}" if isinstance(value, float) else str(value)
    return ""
