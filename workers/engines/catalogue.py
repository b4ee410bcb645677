"""Which engines there are: ours by their names, others by entry point or as ``module:Class``.

A package that brings an engine registers it under the group ``hotspare.engines``; nothing of it is imported before an
engine of that name is wanted. Names of ours stay ours: no package can stand in for ``vllm`` by being installed.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Final

import msgspec

from workers.engine import EngineConfigError

GROUP: Final = "hotspare.engines"
"""Entry points of this group are engines."""

OURS: Final = {
    "vllm": "workers.engines.vllm.engine:VllmEngine",
    "sim": "workers.engines.sim.engine:SimEngine",
    "sglang": "workers.engines.sglang.engine:SglangEngine",
    "trtllm": "workers.engines.trtllm.engine:TrtllmEngine",
}
"""The same as in this project's metadata, so that a start with one of them looks at no package's."""

_TARGET: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that could be loaded."""

    name: str
    """What ``--engine`` was given, or could be."""
    target: str
    """``module:Class``."""
    package: str
    """What brings it; "" for a class that was named itself."""


def installed() -> tuple[Found, ...]:
    """All engines that have a name here: ours first, others in the order of their names."""
    ours = tuple(Found(name=name, target=target, package="hotspare") for name, target in OURS.items())
    return ours + tuple(sorted(_others(), key=lambda found: found.name))


def find(name: str) -> Found:
    """The engine that ``name`` means, not imported yet.

    Raises:
        EngineConfigError: there is none; says which there are, and how another one is installed.
    """
    if name in OURS:
        return Found(name=name, target=OURS[name], package="hotspare")
    if _TARGET.fullmatch(name):
        return Found(name=name, target=name, package="")
    if ":" in name or not _NAME.fullmatch(name):
        raise EngineConfigError(f"{name!r} is neither the name of an engine nor a class as module:Class")
    others = [found for found in _others() if found.name == name]
    if len({found.target for found in others}) > 1:
        packages = " and ".join(sorted(found.package for found in others))
        raise EngineConfigError(f"{packages} both bring an engine {name!r}; name the class itself, as module:Class")
    if not others:
        known = ", ".join(dict.fromkeys(found.name for found in installed()))
        raise EngineConfigError(
            f"there is no engine {name!r} here; there are {known}. Another one comes with a package that has it as an "
            f"entry point {GROUP!r}, installed beside hotspare, or is named as module:Class (docs/engines.md)"
        )
    return others[0]


def load(found: Found) -> type[Any]:
    """Import it; whether it fits is ``workers.engines.fit``'s to say.

    Raises:
        EngineConfigError: its module cannot be imported, or has no such class.
    """
    module_name, _, class_name = found.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = "; install it in this environment, or put its folder into PYTHONPATH"
        raise EngineConfigError(f"the engine {found.name} cannot be imported: {error}{hint}") from error
    loaded = getattr(module, class_name, None)
    if not isinstance(loaded, type):
        what = "has no" if loaded is None else "is no class:"
        raise EngineConfigError(f"the engine {found.name} cannot be loaded: {module_name} {what} {class_name}")
    return loaded


def _others() -> list[Found]:
    from importlib.metadata import entry_points  # only who wants another's engine waits for this look around

    return [
        Found(name=point.name, target=point.value, package=point.dist.name if point.dist is not None else "")
        for point in entry_points(group=GROUP)
        if point.name not in OURS and _TARGET.fullmatch(point.value)
    ]
