"""The socket that clients connect to."""

from __future__ import annotations

import errno
import socket
from typing import Final

from app.address import Address
from app.start_error import StartError

BACKLOG: Final = 4096
"""Connections that may queue until they are accepted."""

_HINTS: Final = {
    errno.EADDRINUSE: "; choose another with --port, or 0 for any free one",
    errno.EADDRNOTAVAIL: "; it is no address of this machine: name one with --host, or 0.0.0.0 for all of them",
    errno.EACCES: "; choose a port from 1024 on with --port",
}


def bind(host: str, port: int) -> socket.socket:
    """A bound socket of our own, so that the port is known before serving.

    Raises:
        StartError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"cannot resolve the host {host!r} to listen on: {error}; name another with --host or HOTSPARE_HOST"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = _HINTS.get(error.errno or 0, "")
        raise StartError(f"cannot listen on {Address(host, port)}: {error.strerror}{hint}") from None
    listener.setblocking(False)
    return listener
