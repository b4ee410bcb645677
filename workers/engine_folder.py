"""An engine's own folder, for sockets: empty at its start, and gone after it.

Whatever an engine that died has left there is in nobody's way, so that clearing up never keeps the next one from
starting: a child that it left behind may still write there, and what cannot be removed is said and left.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_TRIES: Final = 3


def make_empty(folder: Path) -> None:
    """
    Raises:
        OSError: it cannot be made.
    """
    remove(folder)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
    folder.mkdir(mode=0o700, exist_ok=True)


def remove(folder: Path) -> None:
    """As far as that can be done."""
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            problem = error
        else:
            return
    logger.warning("the engine's folder %s cannot be removed, and is left: %s", folder, problem or "it changes")
