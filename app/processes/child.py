"""``python -m app.processes.child``: one of several gateway processes, started by ``supervisor`` and by nobody else.

Arguments: descriptors of the listening socket and of the pipe for "I listen", the supervisor's pid, which child this
is, of how many, and their folder; then the gateway's own arguments.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from app.__main__ import die_with_parent, raise_file_limit, read_settings, serve
from app.exit_codes import BAD_CONFIGURATION
from app.processes.siblings import Place
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
            return serve(settings, listener, place=Place(index, count, folder), on_listening=lambda: _tell(ready))
    except StartError as error:
        print(f"hotspare gateway: {error}", file=sys.stderr)
        return BAD_CONFIGURATION


def _tell(ready: int) -> None:
    os.write(ready, b".")
    os.close(ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
