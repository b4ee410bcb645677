"""Pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that takes no more; a write to it waits."""
    reading_end, writing_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing_end, b"x" * 4096)
    os.set_blocking(writing_end, True)
    return reading_end, writing_end
