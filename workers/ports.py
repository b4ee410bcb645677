"""Free TCP ports that stay free until they are used.

Asking the kernel for a port, closing the socket and using the number later is a race that a busy machine loses. A
``PortReservation`` keeps the socket bound but not listening. Linux lets another socket bind the same address when
both have SO_REUSEADDR and neither listens, and lets that one listen; so the process the port is meant for gets it,
while the kernel gives the number to nobody who asks for *any* port, and a second listener still gets EADDRINUSE.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class PortReservation:
    """One reserved TCP port on ``host``. Close it when the port is no longer needed; closing twice is fine."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Reserve a port.

        Raises:
            OSError: the host is not an address of this machine, or no port is free.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
            self.host = host
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Give the number back to the kernel. Whoever listens on it goes on listening."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
