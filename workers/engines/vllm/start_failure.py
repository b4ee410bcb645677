"""What an error means that ended a start: settings and model are for a person to change, anything else may pass.

A start that may succeed the next time ends with ``EngineDeadError``, and the keeper forks another engine. One that
would end the same way again ends with ``EngineConfigError``, and nobody tries again. So a machine that is short of
memory or descriptors, or a disk that fails for a moment, must not look like a wrong setting, in whatever error vLLM,
transformers or safetensors have wrapped it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Final

from workers.engine import EngineConfigError, EngineDeadError

_FOR_A_PERSON: Final = frozenset(
    {
        errno.EACCES,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENODEV,  # what the kernel says to somebody who maps a folder
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""The file that is named, or who may do what with it, is wrong. All other system errors may pass."""
_NO_MEMORY: Final = ("allocate memory", "out of memory", "Free memory on device")
"""torch's for a CPU and for a GPU, which are RuntimeErrors, and vLLM's, a ValueError."""
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust write a system error, whose number Python does not get."""
_MOST_LINKS: Final = 20


def failure_of(error: BaseException, saying: str) -> EngineConfigError | EngineDeadError:
    """The error to raise in the place of ``error``; ``saying`` is the beginning of a sentence: whose settings it may
    be."""
    text = one_line(error)
    if short_of_memory(error):
        return EngineDeadError(f"there was not enough memory for the engine: {text}")
    if may_pass(error):
        return EngineDeadError(f"the engine could not be built this time: {type(error).__name__}: {text}")
    return EngineConfigError(f"{saying}: {text}")


def short_of_memory(error: BaseException) -> bool:
    """Whether this error, or one behind it, is about memory."""
    return any(
        isinstance(link, MemoryError) or _number(link) == errno.ENOMEM or any(sign in str(link) for sign in _NO_MEMORY)
        for link in _links(error)
    )


def may_pass(error: BaseException) -> bool:
    """Whether the same start may succeed when it is tried again."""
    return short_of_memory(error) or any(_passes(link) for link in _links(error))


def is_for_a_person(error: BaseException) -> bool:
    """Whether vLLM raises such errors while it builds an engine since settings or model are wrong. Others are mistakes
    of its own, or of ours."""
    kinds = (ValueError, KeyError, OSError, AssertionError)
    return isinstance(error, kinds) or "safetensor" in type(error).__name__.lower()


def _passes(error: BaseException) -> bool:
    number = _number(error)
    if number is not None:
        return number not in _FOR_A_PERSON
    if isinstance(error, FileNotFoundError):
        # safetensors says so of each file that it cannot open, for want of descriptors, too.
        return os.path.exists(str(error).partition(": ")[2])
    # Without a number an OSError is a sentence of a library's, about a model that it does not know.
    return isinstance(error, TimeoutError | ConnectionError)


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or in the handling of."""
    for _ in range(_MOST_LINKS):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(error: BaseException) -> str:
    """An error's text for the middle of a sentence: pydantic and vLLM like several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "errors.pydantic.dev" not in line]
    return " ".join(lines)[:600] or type(error).__name__
