"""A client that leaves, seen from the engine: it stops working for nobody."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.sdk.conftest import MODEL
from tests.support.machine import Machine
from tests.support.processes import MS, until

pytestmark = [pytest.mark.sdk, pytest.mark.process, pytest.mark.timeout(60)]

TOKENS = 100_000
"""So many that they would take the engine most of a minute."""


def inflight(machine: Machine) -> int:
    """Requests that engines are answering, by their own count."""
    engines = [engine for pod in machine.settled()["pods"] for engine in pod["engines"].values()]
    return sum(engine["inflight"] or 0 for engine in engines)


@pytest.mark.parametrize("stream", [True, False], ids=["a stream", "a whole answer"])
def test_the_engine_stops(machine: Machine, base_url: str, stream: bool) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": TOKENS, "stream": stream}).encode()
    address = urlsplit(base_url)
    assert address.hostname
    assert address.port
    until(lambda: inflight(machine) == 0, saying="the engines have nothing to do")
    with socket.create_connection((address.hostname, address.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: inflight(machine) == 1, saying="an engine answers it")
    until(lambda: inflight(machine) == 0, saying="the engine has stopped", seconds=20_000 * MS)
    gateway = machine.settled()["gateway"]
    assert (gateway["inflight"], gateway["waiting"]) == (0, 0)
