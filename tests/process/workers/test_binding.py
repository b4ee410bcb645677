"""The serving port: nobody listens beside its holder, no fork keeps it, and a server that cannot start says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from workers.asgi import Receive, Scope, Send
from workers.binding import BadHost, PortTaken, bind, bind_when_free
from workers.http_server import serve_http
from workers.ports import PortReservation

pytestmark = pytest.mark.process

FORKER = """
import os, sys
from workers.asgi import Receive, Scope, Send
from workers.binding import bind
sock = bind("127.0.0.1", int(sys.argv[1]))
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)  # by now what a fork must not keep is closed
    sys.stdin.readline()
    os._exit(0)
sys.stdin.readline()
"""


def test_a_fork_of_its_holder_does_not_keep_the_port() -> None:
    with PortReservation("127.0.0.1") as reserved:
        holder = subprocess.Popen(
            [sys.executable, "-c", FORKER, str(reserved.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout
        assert holder.stdin
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(PortTaken):
                bind("127.0.0.1", reserved.port)
            holder.kill()
            holder.wait()
            os.kill(child, 0)
            bind("127.0.0.1", reserved.port).close()
        finally:
            os.kill(child, signal.SIGKILL)
            holder.stdin.close()
            holder.stdout.close()


async def test_waiting_for_a_port_ends_with_the_name_of_its_holder() -> None:
    with PortReservation("127.0.0.1") as reserved:
        taken = bind("127.0.0.1", reserved.port)
        began = time.monotonic()
        with pytest.raises(PortTaken, match=f"process {os.getpid()} "):
            await bind_when_free("127.0.0.1", reserved.port, timeout_seconds=0.1)
        assert time.monotonic() - began >= 0.1
        taken.close()
        (await bind_when_free("127.0.0.1", reserved.port, timeout_seconds=1)).close()


async def test_a_server_that_cannot_start_is_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asks")

    sock = bind("127.0.0.1", 0)
    sock.close()
    with pytest.raises((OSError, ValueError)):
        async with serve_http(app, sock):
            pytest.fail("it is not serving")


@pytest.mark.parametrize("host", ["abc.invalid", "203.0.113.1", f"{'x' * 64}.invalid"])
def test_a_host_that_is_none_of_this_machine_is_blamed_itself(host: str) -> None:
    with pytest.raises(BadHost, match=r"nothing can listen on the host .* with --host or HOTSPARE_HOST$"):
        bind(host, 0)
