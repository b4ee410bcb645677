"""/live on the metrics port: whether the service's own loop answers, not whether some thread of it does."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, LeaseMode
from tests.process.gms.processes import until
from workers.ports import PortReservation

pytestmark = pytest.mark.process


@pytest.fixture
def port() -> Iterator[int]:
    with PortReservation() as free:
        yield free.port


def live(port: int, *, timeout: float = 10.0) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_says_what_lives(serve: Callable[..., Any], socket_path: Path, port: int) -> None:
    serve("--metrics-port", str(port))
    # A busy machine may keep its loop from answering in time.
    until(lambda: live(port) == (200, {"status": "live", "device": "cpu:0", "clients": 0}), "it lives")
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        client.attach("kv", LeaseMode.RW)
        until(lambda: live(port)[1].get("clients") == 1, "it has a client")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"hotspare_gms_clients" in answer.read()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live?verbose", timeout=10) as answer:
        assert answer.status == 200


def test_a_loop_that_hangs_is_not_alive(spawn: Callable[..., Any], socket_path: Path, port: int) -> None:
    """The threads that answer go on; the loop stands in a signal's handler until it is told to go on."""
    code = (
        "import os, signal, sys\n"
        "import gms.__main__ as main\n"
        "def hang(*_):\n"
        "    print('hangs', flush=True)\n"
        "    os.read(0, 1)\n"
        "    print('goes on', flush=True)\n"
        "signal.signal(signal.SIGUSR1, hang)\n"
        f"sys.argv = ['gms', '--socket', {str(socket_path)!r}, '--metrics-port', '{port}']\n"
        "sys.exit(main.main())\n"
    )
    service = spawn(["-c", code])
    until(lambda: _answers(port) and live(port)[0] == 200, "it is up")
    service.signal(signal.SIGUSR1)
    assert service.line() == "hangs"
    status, said = live(port)
    assert (status, said["status"]) == (503, "hung")
    assert said["reason"] == "the service's loop did not answer within 2 s"
    service.tell()
    assert service.line() == "goes on"
    until(lambda: live(port)[0] == 200, "it answers again")


def test_a_stopped_service_answers_nothing(serve: Callable[..., Any], port: int) -> None:
    service = serve("--metrics-port", str(port))
    until(lambda: live(port)[0] == 200, "it lives")
    service.signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            live(port, timeout=1)
    finally:
        service.signal(signal.SIGCONT)
    until(lambda: live(port)[0] == 200, "it answers again")


def _answers(port: int) -> bool:
    try:
        live(port)
    except OSError:
        return False
    return True
