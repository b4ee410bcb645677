from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workers.ports import PortReservation

LISTEN = """
import socket, sys
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(("127.0.0.1", int(sys.argv[1])))
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@contextmanager
def listener(port: int) -> Iterator[None]:
    """Another process that listens on ``port`` while inside."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "listening\n"
        yield
        process.stdin.close()
        assert process.wait(10) == 0


def try_to_listen(port: int) -> int:
    """0, or the errno."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError as error:
            return error.errno or -1
        return 0


def test_the_process_it_is_meant_for_can_listen_again_and_again() -> None:
    with PortReservation() as reserved:
        for _ in range(2):
            with listener(reserved.port):
                socket.create_connection((reserved.host, reserved.port), timeout=5).close()


def test_a_second_listener_is_refused() -> None:
    with PortReservation() as reserved, listener(reserved.port):
        assert try_to_listen(reserved.port) == errno.EADDRINUSE
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                sock.bind((reserved.host, reserved.port))


def test_nobody_connects_while_only_the_reservation_is_there() -> None:
    with PortReservation() as reserved, pytest.raises(ConnectionRefusedError):
        socket.create_connection((reserved.host, reserved.port), timeout=5)


def test_who_does_not_ask_for_reuse_is_refused() -> None:
    with PortReservation() as reserved, socket.socket() as sock, pytest.raises(OSError, match="in use"):
        sock.bind((reserved.host, reserved.port))


def test_reservations_differ() -> None:
    held = [PortReservation() for _ in range(50)]
    try:
        assert len({one.port for one in held}) == len(held)
    finally:
        for one in held:
            one.close()


def test_close_gives_the_descriptor_back_and_may_be_repeated() -> None:
    before = os.listdir("/proc/self/fd")
    reserved = PortReservation()
    reserved.close()
    reserved.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_host_that_is_not_ours_is_an_error_without_a_leak() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Cannot assign requested address"):
        PortReservation("192.0.2.1")
    assert os.listdir("/proc/self/fd") == before
