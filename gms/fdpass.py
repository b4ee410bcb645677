"""Descriptors beside bytes: the one place that takes SCM_RIGHTS apart, for both ends of a connection."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable
from typing import Final

from gms.protocol import MAX_FDS

_INT_BYTES: Final = array.array("i").itemsize
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_FDS * _INT_BYTES)
"""Room for the descriptors of one message. More than that sets MSG_CTRUNC, which is an error."""


def rights(fds: Iterable[int]) -> list[tuple[int, int, bytes]]:
    """Ancillary data for sendmsg; empty for no descriptors."""
    packed = array.array("i", fds)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed.tobytes())] if packed else []


def received(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what recvmsg returned; the caller owns them from here on."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(fds)


def close_all(fds: list[int]) -> None:
    """Closes and forgets every descriptor in the list."""
    while fds:
        os.close(fds.pop())
