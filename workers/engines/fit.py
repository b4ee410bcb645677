"""Whether a class can be driven as an engine: what ``workers.engine.Engine`` asks for, looked up in the Protocol.

A method that is missing, or that takes no ``epoch``, would otherwise be found out at the first promotion, which is the
worst moment there is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

from workers.engine import Engine, EngineConfigError

PROTOCOL_PAGE: Final = "docs/engines.md"
_CONSTRUCTED_FROM: Final = ("settings", "service", "runtime_dir")


def methods() -> dict[str, Any]:
    """The Protocol's methods by name."""
    return {name: value for name, value in vars(Engine).items() if inspect.isfunction(value) and name[0] != "_"}


def facts() -> tuple[str, ...]:
    """What is read and not called: the Protocol's attributes and properties."""
    properties = [name for name, value in vars(Engine).items() if isinstance(value, property)]
    return (*Engine.__annotations__, *properties)


def check_class(cls: type[Any], *, name: str) -> None:
    """Refuse a class that cannot be driven.

    Raises:
        EngineConfigError: names everything that is missing or different.
    """
    _refuse(name, [*_constructor(cls), *(misfit for method in methods() for misfit in _method(cls, method))])


def check_instance(engine: object, *, name: str) -> None:
    """The same for what may be set in the constructor. A property is not asked for its value here.

    Raises:
        EngineConfigError: names everything that is missing.
    """
    _refuse(
        name,
        [f"it has no `{fact}`" for fact in facts() if not hasattr(type(engine), fact) and not hasattr(engine, fact)],
    )


def _refuse(name: str, misfits: list[str]) -> None:
    if misfits:
        raise EngineConfigError(f"{name} is no engine: {'; '.join(misfits)} ({PROTOCOL_PAGE} has what an engine needs)")


def _constructor(cls: type[Any]) -> Iterator[str]:
    if inspect.isabstract(cls):
        yield f"it is abstract ({', '.join(sorted(cls.__abstractmethods__))})"
        return
    try:
        inspect.signature(cls).bind(*_CONSTRUCTED_FROM)
    except (TypeError, ValueError):
        yield f"it cannot be made as Class({', '.join(_CONSTRUCTED_FROM)})"


def _method(cls: type[Any], name: str) -> Iterator[str]:
    wanted, found = methods()[name], getattr(cls, name, None)
    if found is None:
        yield f"it has no method `{name}`"
        return
    if not callable(found):
        yield f"its `{name}` is not a method"
        return
    if inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(found):
        yield f"its `{name}` must be `async def`"
    elif inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(wanted):
        yield f"its `{name}` must be a plain `def`, not `async def`"
    asked = inspect.signature(wanted).parameters.values()
    named = {parameter.name: None for parameter in asked if parameter.kind is parameter.KEYWORD_ONLY}
    bound = isinstance(inspect.getattr_static(cls, name), classmethod | staticmethod)
    try:
        inspect.signature(found).bind(*(() if bound else (None,)), **named)
    except (TypeError, ValueError):
        yield f"its `{name}` must be callable as `{name}({', '.join(f'{word}=…' for word in named)})`"
