"""One process that serves: from its settings to its exit code.

What is compiled must not be imported before it is known where it comes from, and the rest of the server takes half a
second to import: so both come late.
"""

from __future__ import annotations

import gc
import resource
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app import compiled
from app.processes.stop_signals import leave_if_stopped
from app.settings import GatewaySettings

if TYPE_CHECKING:
    from app.processes.siblings import Place


def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    *,
    place: Place | None = None,
    on_listening: Callable[[], None] | None = None,
    on_drained: Callable[[], Awaitable[None]] | None = None,
    on_forced_exit: Callable[[], None] | None = None,
) -> int:
    """Serve in this process until drained; returns the exit code. ``place``: it is one of several, ``on_drained``:
    which end together."""
    from app.telemetry.logs import configure_logging

    sink = configure_logging(settings.log_format, settings.log_level, with_pid=settings.processes > 1)
    compiled.use()
    from app.factory import create_app
    from app.server import GatewayServer

    leave_if_stopped()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    app = create_app(settings, sink, place, files=sys.maxsize if files == resource.RLIM_INFINITY else files)
    server = GatewayServer(app, on_listening=on_listening, on_drained=on_drained, on_forced_exit=on_forced_exit)
    # What is here now stays: the collector, which runs while requests wait, need not look at it again and again.
    gc.collect()
    gc.freeze()
    leave_if_stopped()
    server.run(sockets=[listener])
    return server.exit_code
