"""Who is at the other end of a connection, by the kernel's word: its user, and its processes by their pidfds."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from gms.protocol import ErrorCode, GmsError

SO_PEERPIDFD: Final = 77
"""Linux 6.5; not in the socket module."""


def check_peer(connection: socket.socket) -> None:
    """Raises GmsError(not_permitted) for another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (os.geteuid(), 0):
        message = f"User {uid} may not use the memory service of user {os.geteuid()}; run both as one user."
        raise GmsError(ErrorCode.NOT_PERMITTED, message)


def pid_of(pidfd: int) -> int:
    """The process of a pidfd as seen from here: 0 if it is in another namespace, -1 if it is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise GmsError(ErrorCode.BAD_FDS, "A descriptor in a hello is not a pidfd; this client is broken.")


def processes_of(pidfds: list[int], pids: list[int]) -> frozenset[tuple[str, int]]:
    """What is equal for pidfds of the same living processes and for no others: the inodes where pidfds have a file
    system of their own (Linux 6.9) and do not share one with all other anonymous files; else the pids, which nobody
    else gets as long as one of the pidfds is not readable. Empty if one of them cannot be told."""
    other = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        shared = os.fstat(other).st_dev
    finally:
        os.close(other)
    found = [os.fstat(pidfd) for pidfd in pidfds]
    if all(file.st_dev != shared for file in found):
        return frozenset(("pidfs", file.st_ino) for file in found)
    return frozenset(("pid", pid) for pid in pids) if min(pids) > 0 else frozenset()


def prefer_peer_pidfd(connection: socket.socket, fds: list[int]) -> None:
    """Where the kernel itself names the peer's process, its word replaces the client's."""
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, struct.calcsize("i"))
    except OSError:
        return
    os.close(fds[0])
    (fds[0],) = struct.unpack("i", packed)
