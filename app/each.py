"""Telling many of something, so that one that fails costs no other its turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def each(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make each call, and return what those returned that did not raise. An exception is a bug of ours: it is logged,
    and goes no further."""
    returned = []
    for call in calls:
        try:
            returned.append(call())
        except Exception:
            logger.exception("one of those to be told failed; the others were told all the same")
    return returned
