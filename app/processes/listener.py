"""The socket that clients connect to."""

from __future__ import annotations

import socket
from typing import Final

from app.start_error import StartError

BACKLOG: Final = 4096
"""Connections that may queue until they are accepted."""


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
        raise StartError(f"cannot resolve the host {host!r} to listen on: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port, or 0 for any free one" if "in use" in str(error) else ""
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    listener.setblocking(False)
    return listener
