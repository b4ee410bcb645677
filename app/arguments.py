"""A gateway's command line: flags over environment over defaults, and a sentence about what is wrong with them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import NoReturn

from pydantic import AliasChoices, ValidationError

from app.settings import GatewaySettings, another_name
from app.start_error import StartError

_SECRET = frozenset(("api_keys", "worker_token"))
"""Settings whose values are repeated nowhere."""

_MOST_SHOWN = 200
"""Characters of a value that a refusal repeats."""

_OTHER_FLAGS = {"resume_limit": ("--migration-limit",)}

_PATHS = ("api_keys_file", "worker_token_file", "tls_certificate", "tls_key", "workers_file", "run_dir")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message}; see hotspare gateway --help")


def parser() -> argparse.ArgumentParser:
    """The flags. ``hotspare gateway --help`` explains them more fully, from the docstrings of the settings."""
    made = _Parser(prog="hotspare gateway", description="Hotspare's gateway: the OpenAI API.", allow_abbrev=False)
    for name, field in GatewaySettings.model_fields.items():
        flag, usage = f"--{name.replace('_', '-')}", f"overrides HOTSPARE_{name.upper()}"
        if name == "api_keys":
            made.add_argument("--api-key", dest=name, action="append", metavar="KEY", help=usage)
        elif field.annotation is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=usage)
        elif name not in _SECRET:
            made.add_argument(flag, *_OTHER_FLAGS.get(name, ()), dest=name, default=None, help=usage)
    return made


def read_settings(arguments: Sequence[str]) -> GatewaySettings:
    """Flags over environment over defaults.

    Raises:
        StartError: an unknown flag or a bad value.
    """
    given = {name: value for name, value in vars(parser().parse_args(arguments)).items() if value is not None}
    if empty := sorted(name for name in _PATHS if given.get(name) == ""):
        # As a variable that is no setting; in a flag, something that was to be there is not.
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in empty)
        raise StartError(f"{flags}: the path is empty; name a file, or leave the flag out")
    if sentences := _not_text(given):
        raise StartError("; ".join(sentences))
    try:
        return GatewaySettings(**given)
    except ValidationError as error:
        raise StartError(
            "; ".join(_sentence(item["loc"], item["msg"], item["input"], flags=given) for item in error.errors())
        ) from None


def _shown(value: object) -> str:
    """On one line, and not a long one."""
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _not_text(given: Mapping[str, object]) -> list[str]:
    """Sentences about bytes that are no UTF-8, in variables or flags: as ``gms.legible.not_text`` for other processes.
    What was given is not repeated."""
    named = {name: value for name, value in os.environ.items() if name.upper().startswith("HOTSPARE_")}
    named |= {f"--{name.replace('_', '-')}": value for name, value in given.items() if isinstance(value, str)}
    lone = re.compile("[\ud800-\udfff]")
    return [f"{ascii(name)[1:-1]}: its bytes are no UTF-8" for name, value in named.items() if lone.search(value)]


def _sentence(location: tuple[int | str, ...], message: str, value: object, *, flags: Container[str]) -> str:
    reason = message.removeprefix("Value error, ")
    if not location:
        return reason
    name = str(location[0])
    said = name if name in flags else another_name(name) or name  # what the person has written down somewhere
    given = said if name in _SECRET else f"{said}={_shown(value)}"
    if name == "worker_token":
        return f"{given}: {reason} (set it with HOTSPARE_WORKER_TOKEN or HOTSPARE_WORKER_TOKEN_FILE)"
    flag = "--api-key" if name == "api_keys" else f"--{name.replace('_', '-')}"
    alias = GatewaySettings.model_fields[name].validation_alias if name in GatewaySettings.model_fields else None
    others = [str(it) for it in alias.choices[2:]] if isinstance(alias, AliasChoices) else []
    read = f"; {' and '.join(others)} {'is' if len(others) == 1 else 'are'} read, too" if others else ""
    return f"{given}: {reason} (set it with {flag} or HOTSPARE_{name.upper()}{read})"
