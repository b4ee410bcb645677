"""The gateway process, one or several: from its command line to its exit code.

Whatever is wrong with its settings or its surroundings is one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence

from app.arguments import read_settings
from app.exit_codes import BAD_CONFIGURATION
from app.processes.announcement import announced
from app.processes.kernel import die_with_parent, have_strays_buried, raise_file_limit
from app.processes.listener import BACKLOG, bind
from app.processes.stop_signals import leave_if_stopped
from app.serve import serve
from app.settings import GatewaySettings
from app.start_error import StartError


def run(settings: GatewaySettings, arguments: Sequence[str]) -> int:
    """Serve until drained; returns the exit code. ``arguments``: those the settings were read from."""
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    raise_file_limit()
    # What can fail quickly has been checked; the server's own imports take half a second.
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        leave_if_stopped()
        host, port = listener.getsockname()[:2]
        if settings.processes > 1:
            listener.listen(BACKLOG)  # whoever reads the announcement may connect: it waits for the first process
        with announced(settings.run_dir, host, port, certificate=settings.tls_certificate) as announcement:
            if settings.processes > 1:
                return supervise(settings, listener, arguments)
            have_strays_buried()
            return serve(settings, listener, on_forced_exit=announcement.withdraw)


def supervise(settings: GatewaySettings, listener: socket.socket, arguments: Sequence[str]) -> int:
    """Have several processes serve from this socket until they are drained; returns the exit code."""
    from app.access import Access
    from app.processes.supervisor import Supervisor, meeting_place
    from app.telemetry.logs import configure_logging

    configure_logging(settings.log_format, settings.log_level, with_pid=settings.processes > 1)
    Access(settings)  # a file that cannot be used is said here, once, and not by each child
    with meeting_place() as folder:
        return Supervisor(
            listener,
            arguments,
            count=settings.processes,
            folder=folder,
            drain_seconds=settings.drain_timeout_seconds,
        ).run()


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    leave_if_stopped()
    try:
        return run(read_settings(given), given)
    except StartError as error:
        print(f"hotspare gateway: {error}", file=sys.stderr)
        return BAD_CONFIGURATION
