"""Binding the pod's serving port: only the lock holder does, and a dying holder may still have it for a moment.

``SO_REUSEADDR``, never ``SO_REUSEPORT``: two engines must not be able to listen side by side. On Linux the option lets
a listener bind over connections in TIME_WAIT, and still refuses while somebody listens.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from typing import Final

from workers.forks import close_in_forks
from workers.hosts import authority

RETRY_SECONDS: Final = 0.002
BACKLOG: Final = 2048
_LISTEN_STATE: Final = "0A"


class BadHost(OSError):
    """It is no name or address of this machine, so that no port on it can be had; the message is a sentence."""

    def __init__(self, host: str, error: Exception) -> None:
        why = getattr(error, "strerror", None) or error
        super().__init__(
            f"nothing can listen on the host {host!r}: {why}; name an address of this machine with --host or "
            "HOTSPARE_HOST"
        )


class PortTaken(Exception):
    """Somebody else listens on the port."""

    def __init__(self, host: str, port: int, holder: str = "") -> None:
        super().__init__(f"{authority(host, port)} is in use" + (f" by {holder}" if holder else ""))
        self.host = host
        self.port = port


def bind(host: str, port: int) -> socket.socket:
    """A listening, non-blocking socket.

    Raises:
        PortTaken: the port is in use.
        BadHost: there is no such address here.
        OSError: anything else (no permission).
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadHost(host, error) from error
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
        close_in_forks(sock)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(host, port) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadHost(host, error) from error
        raise
    return sock


async def bind_when_free(host: str, port: int, *, timeout_seconds: float) -> socket.socket:
    """Like ``bind``, but wait for a holder that is about to be gone, trying every 2 ms.

    Raises:
        PortTaken: still taken after ``timeout_seconds``; the message says by whom, as far as this user may see. That is
            looked up only then: it takes as long as a whole promotion.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return bind(host, port)
        except PortTaken as error:
            if time.monotonic() >= deadline:
                raise PortTaken(host, port, await asyncio.to_thread(_holder_of, port)) from error
        await asyncio.sleep(RETRY_SECONDS)


def _holder_of(port: int) -> str:
    """Who listens on ``port``, for a message: a process by pid and command, or that it cannot be seen."""
    inodes = _listening_inodes(port)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                        command = cmdline.read(120).replace(b"\0", b" ").decode(errors="replace").strip()
                    return f"process {pid} ({command})"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return "a process that cannot be seen from here"


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                next(lines, None)
                for line in lines:
                    fields = line.split()
                    if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                        found.add(f"socket:[{fields[9]}]")
        except FileNotFoundError:
            continue
    return found
