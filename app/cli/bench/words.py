"""Words of an option that takes several."""

from __future__ import annotations

from collections.abc import Sequence

from app.cli.errors import CliError
from workers.exit_codes import ExitCode


def words(given: str, known: Sequence[str], option: str) -> list[str]:
    """Comma separated, each once.

    Raises:
        CliError: one is not known; ``option`` says whose it is.
    """
    found = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    for word in found:
        if word not in known:
            raise CliError(f"{option} has {word!r}; it takes {', '.join(known)}", code=ExitCode.BAD_CONFIGURATION)
    return found
