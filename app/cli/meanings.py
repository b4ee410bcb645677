"""What the settings classes say about themselves, for ``--help`` and for docs/settings.md: names, defaults, meanings.

Meanings are the attribute docstrings, read from the source. pydantic could do that (``use_attribute_docstrings``), at
the price of 20 to 30 ms in each start of each process; only who asks for help should pay.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, Literal, get_args, get_origin

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
    values: str = ""
    """Which values it takes, where the type says so: a range, or words."""


def parser_of(process: Process) -> argparse.ArgumentParser:
    """The process's own parser."""
    match process:
        case Process.GATEWAY:
            from app.arguments import parser as gateway_parser

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
            values=_values(field),
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


def _values(field: FieldInfo) -> str:
    """From the annotation: bounds of numbers, also of those in a list or of an optional one; the words of a literal."""
    if field.annotation is bool:
        return "true, false"
    said = [*field.metadata, *_said_within(field.annotation)]
    if words := [str(word) for literal in said if get_origin(literal) is Literal for word in get_args(literal)]:
        return ", ".join(words)
    bounds = {name: getattr(it, name) for it in said for name in ("ge", "gt", "le", "lt") if hasattr(it, name)}
    return range_of(**bounds)


def _said_within(annotation: Any) -> Iterator[Any]:
    """Everything that stands in an annotation, flat: literals, and what says something about a number."""
    if get_origin(annotation) is Literal:
        yield annotation
    for part in get_args(annotation):
        yield from part.metadata if isinstance(part, FieldInfo) else _said_within(part)


def range_of(
    *, ge: float | None = None, gt: float | None = None, le: float | None = None, lt: float | None = None
) -> str:
    """A range for people; "" if there are no bounds. Pure."""
    least = f"{ge:.15g}" if ge is not None else f"above {gt:.15g}" if gt is not None else ""
    most = f"{le:.15g}" if le is not None else f"below {lt:.15g}" if lt is not None else ""
    if least and most:
        return f"{least} to {most}"
    if least:
        return f"{least} or more" if ge is not None else least
    return f"at most {most}" if le is not None else most


def _default(field: FieldInfo) -> str:
    match field.default:
        case bool(value):
            return "true" if value else "false"
        case tuple(values):
            return ",".join(map(str, values))
        case str() | int() | float() | Path() as value:
            return f"{value:g}" if isinstance(value, float) else str(value)
    return ""
