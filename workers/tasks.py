"""Tasks that nobody waits for: how they end is said, and never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def told_of_failure(task: asyncio.Task[Any], tell: Callable[[Exception], None]) -> None:
    """Have ``tell`` called with what ends ``task``, should that be an error; a cancellation is none."""

    def ended(done: asyncio.Task[Any]) -> None:
        if not done.cancelled() and isinstance(error := done.exception(), Exception):
            tell(error)

    task.add_done_callback(ended)


def logged(task: asyncio.Task[Any], saying: str) -> None:
    """Have an error that ends ``task`` in the log, with its trace; ``saying``: what does not happen by it."""
    told_of_failure(task, lambda error: logger.error("%s: %s", saying, error, exc_info=error))
