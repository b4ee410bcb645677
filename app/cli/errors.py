"""What the command line says when it cannot do what it was asked."""

from __future__ import annotations


class CliError(Exception):
    """One sentence for the person at the terminal, and the exit code that goes with it (``workers.exit_codes``)."""

    def __init__(self, sentence: str, *, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code
