"""``python -m app.child``: one of several gateway processes, started by ``supervisor`` and by nobody else.

Arguments: descriptors of the listening socket and of the line to the supervisor, the supervisor's pid, which child this
is, of how many, and their folder; then the gateway's own arguments. On the line it says that it listens, again and
again: a child that hangs falls silent. When it is drained it says so, and goes on answering probes until it hears that
all are: one that left before the others would take connections with it that could have been theirs.

Signals are held from before its first line: the supervisor starts it so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from app.arguments import read_settings
from app.exit_codes import BAD_CONFIGURATION
from app.processes.kernel import die_with_parent, raise_file_limit
from app.processes.siblings import Place
from app.processes.supervision import BEAT, BEAT_SECONDS, DRAINED_WORD, OVERRUN_SECONDS
from app.serve import serve
from app.start_error import StartError

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    descriptor, line, parent, index, count = map(int, arguments[:5])
    folder, own = Path(arguments[5]), arguments[6:]
    try:
        die_with_parent(parent)
        raise_file_limit()
        settings = read_settings(own)
        for inherited in (descriptor, line):
            os.set_inheritable(inherited, False)
        with socket.socket(fileno=descriptor) as listener:
            return serve(
                settings,
                listener,
                place=Place(index, count, folder),
                on_listening=lambda: _beat(line),
                on_drained=lambda: _wait_for_others(line, settings.drain_timeout_seconds + OVERRUN_SECONDS),
            )
    except StartError as error:
        print(f"hotspare gateway: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


def _beat(line: int) -> None:
    """On the event loop, so that it says something about it."""
    with contextlib.suppress(BlockingIOError):  # the supervisor itself stands still
        os.write(line, BEAT)
    asyncio.get_running_loop().call_later(BEAT_SECONDS, _beat, line)


async def _wait_for_others(line: int, seconds: float) -> None:
    """Until all are drained: the supervisor says that by a word, whichever."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(line, over.set)
    try:
        os.write(line, DRAINED_WORD)
        async with asyncio.timeout(seconds):
            await over.wait()
    except (OSError, TimeoutError):
        logger.warning("the supervisor does not say whether the other processes are drained: leaving")
    finally:
        loop.remove_reader(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
