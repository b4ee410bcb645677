"""What the code that tests run in subprocesses begins with: `from tests.process.gms.cuda.prelude import *`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import TypeVar

from gms.backends.base import DeviceError, ForeignPagesError, Identity, OutOfMemoryError
from gms.backends.cuda import CudaBackend
from gms.backends.cuda_calls import CudaError, Driver
from gms.mapping import Backing, Chunk, Reservation, device_memory
from gms.protocol import GmsError

__all__ = [
    "Backing",
    "Chunk",
    "CudaBackend",
    "CudaError",
    "DeviceError",
    "Driver",
    "ForeignPagesError",
    "G",
    "GmsError",
    "Identity",
    "Maker",
    "OutOfMemoryError",
    "Reservation",
    "descriptors",
    "device_memory",
    "inject",
    "os",
    "raised",
    "sha",
    "sha256",
    "suppress",
    "sys",
    "threading",
    "time",
]

G = 2 << 20
"""The granularity, in bytes."""

E = TypeVar("E", bound=BaseException)


def inject(**errors: int) -> None:
    """From now on every call of each function fails with its error, and no other."""
    os.environ["FAKE_CUDA_FAIL"] = ",".join(f"{name}@*={number}" for name, number in errors.items())


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def raised(kind: type[E], call: Callable[..., object], *arguments: object, **more: object) -> E:
    """The error that a call must raise."""
    try:
        call(*arguments, **more)
    except kind as error:
        return error
    raise AssertionError(f"{call} went through")


def sha(data: bytes | memoryview) -> bytes:
    return sha256(data).digest()


class Maker:
    """A process that makes a chunk of G bytes, writes to it where contexts are allowed, sends it here, and waits."""

    CODE = """
import os, socket, sys
from gms.backends.cuda import CudaBackend
from gms.mapping import Chunk, Reservation, device_memory
G = 2 << 20
backend = CudaBackend(0)
pages = backend.create("w", G)
if not os.environ.get("FAKE_CUDA_NO_CONTEXT"):
    range_ = Reservation(G, memory=device_memory("cuda:0"))
    range_.map([Chunk(pages.fd, G)], writable=True)
    range_.write(0, b"still there")
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"x"], [backend.share(pages, writable=False)])
sock.recv(1)
"""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-c", self.CODE, str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()])
        (self.fd,) = socket.recv_fds(self._here, 1, 1)[1]

    def kill(self) -> None:
        self._process.kill()
        assert self._process.wait() == -9
        self._here.close()
