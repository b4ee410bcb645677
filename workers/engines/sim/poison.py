"""A fault for tests: prompts that kill the engine's process, every time, whichever engine runs them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from typing import Final, NoReturn

from workers.engines.sim import tokens

_FORM: Final = re.compile(r"(.+?)(?:@([0-9]{1,9}))?", re.DOTALL)


class Poison:
    """``TEXT`` or ``TEXT@K``: a prompt that contains the text ends the process in the step after its K-th token here,
    without ``@K`` in the one that would have made its first."""

    def __init__(self, setting: str) -> None:
        """``setting`` is not empty."""
        match = _FORM.fullmatch(setting)
        if match is None:
            raise ValueError("it is empty")
        self._text, self._after = match[1].encode(), int(match[2] or 0)

    def dies_after(self, prompt: Sequence[int]) -> int | None:
        """After how many tokens of this prompt the engine dies; None: it does not."""
        return self._after if self._text in b"".join([tokens.PIECES[token] for token in prompt]) else None


def die() -> NoReturn:
    """End this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process outlived SIGKILL")
