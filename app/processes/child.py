"""``python -m app.processes.child``: one of several gateway processes, started by ``supervisor`` and by nobody else.

Arguments: descriptors of the listening socket and of the pipe for "I listen", the supervisor's pid, which child this
is, of how many, and their folder; then the gateway's own arguments. What it says on the pipe it says again and again: a
child that hangs falls silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from app.__main__ import die_with_parent, raise_file_limit, read_settings, serve
from app.exit_codes import BAD_CONFIGURATION
from app.processes.siblings import Place
from app.processes.supervision import BEAT_SECONDS
from app.start_error import StartError


def main(arguments: Sequence[str]) -> int:
    descriptor, ready, parent, index, count = map(int, arguments[:5])
    folder, own = Path(arguments[5]), arguments[6:]
    try:
        die_with_parent(parent)
        raise_file_limit()
        settings = read_settings(own)
        for inherited in (descriptor, ready):
            os.set_inheritable(inherited, False)
        with socket.socket(fileno=descriptor) as listener:
            return serve(settings, listener, place=Place(index, count, folder), on_listening=lambda: _beat(ready))
    except StartError as error:
        print(f"hotspare gateway: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


def _beat(ready: int) -> None:
    """On the event loop, so that it says something about it."""
    with contextlib.suppress(BlockingIOError):  # the supervisor itself stands still
        os.write(ready, b".")
    asyncio.get_running_loop().call_later(BEAT_SECONDS, _beat, ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
