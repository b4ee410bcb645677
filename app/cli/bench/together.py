"""Tasks of one measurement: if one of them fails, the measurement ends at once, and with that error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

from app.cli.bench.system import BenchError

_TELLING: Final = (BenchError, TimeoutError)
"""Errors that say what happened; others beside them are mostly their consequence."""


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose error is a plain one wherever there is only one, or one that says what happened."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as problems:
        raise plain(problems) from None


def plain(problems: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show for a group of them: the group itself only where none stands out. Pure."""
    found = list({id(error): error for error in _leaves(problems)}.values())
    telling = next((error for kind in _TELLING for error in found if isinstance(error, kind)), None)
    return telling or (found[0] if len(found) == 1 else problems)


def _leaves(problems: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in problems.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
