"""``hotspare engines``: which engines are installed here, and what is to be known of each."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.engine import EngineConfigError
from workers.engines import catalogue, fit


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. ``problem`` is why it cannot be used, ``caveat`` what its author warns of."""

    name: str
    target: str
    package: str
    problem: str = ""
    caveat: str = ""


def listed() -> list[Listed]:
    """All that have a name, each imported to see whether it fits."""
    return [_look_at(found) for found in catalogue.installed()]


def show_engines(*, as_json: bool) -> None:
    engines = listed()
    if as_json:
        print(msgspec.json.encode(engines).decode())
        return
    width = max(len(engine.name) for engine in engines)
    for engine in engines:
        note = f"cannot be used: {engine.problem}" if engine.problem else engine.caveat
        print(f"{engine.name:<{width}}  {engine.target} ({engine.package}){f': {note}' if note else ''}")


def _look_at(found: catalogue.Found) -> Listed:
    facts: dict[str, Any] = {"name": found.name, "target": found.target, "package": found.package}
    try:
        loaded = catalogue.load(found)
        fit.check_class(loaded, name=found.target)
    except EngineConfigError as error:
        return Listed(**facts, problem=str(error))
    return Listed(**facts, caveat=str(getattr(loaded, "caveat", "")))
