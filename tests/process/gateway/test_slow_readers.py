"""What clients that stop reading hold in the gateway's memory, over plain connections and over TLS."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.gateway.conftest import ready
from tests.process.gateway.test_many_streams import memory_kib
from tests.support.certificates import Pair, make_pair
from tests.support.processes import Process

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

CLIENTS = 8
EVENTS = 80
EVENT_BYTES = 60_000
LIMIT_KIB = 768
"""For each client, of the 4.6 MiB that it does not read."""
SAME_KIB = 64
LOOK_SECONDS = 0.2
LOOKS = 5


def stops_reading(port: int, number: int, pair: Pair | None) -> socket.socket:
    """A client that has the beginning of its answer and takes no more."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(20)
    plain.connect(("127.0.0.1", port))
    if pair is not None:
        plain = ssl.create_default_context(cafile=str(pair.certificate)).wrap_socket(plain, server_hostname="localhost")
    asked = {"model": "light", "id": f"s{number}", "stream": True, "events": EVENTS, "seconds": 0, "pad": EVENT_BYTES}
    body = json.dumps(asked).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % len(body)
    plain.sendall(head + body)
    assert plain.recv(1000).startswith(b"HTTP/1.1 200")
    return plain


async def steady_kib(pid: int) -> int:
    """The process's memory once it does not change any more."""
    seen: list[int] = []
    while len(seen) < LOOKS or max(seen[-LOOKS:]) - min(seen[-LOOKS:]) > SAME_KIB:
        await asyncio.sleep(LOOK_SECONDS)
        seen.append(await asyncio.to_thread(memory_kib, pid))
    return seen[-1]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_clients_that_stop_reading(start_gateway: Callable[..., Process], tls: bool, tmp_path: Path) -> None:
    pair = await asyncio.to_thread(make_pair, tmp_path / "tls") if tls else None
    flags = () if pair is None else ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    gateway = start_gateway("--drain-timeout-seconds", "0.2", *flags)
    port = await ready(gateway, pair)
    with ExitStack() as open_sockets:
        for number in range(2):  # what is made once is not theirs
            open_sockets.enter_context(await asyncio.to_thread(stops_reading, port, number, pair))
        before = await steady_kib(gateway.pid)
        for number in range(CLIENTS):
            open_sockets.enter_context(await asyncio.to_thread(stops_reading, port, number, pair))
        held = (await steady_kib(gateway.pid) - before) / CLIENTS
        print(f"{held:.0f} KiB of the gateway's memory for each")
        assert held < LIMIT_KIB
        gateway.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait) == 0
