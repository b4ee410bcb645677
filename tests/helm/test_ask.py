"""What `helm test` runs, as the chart has it, against a gateway with sim workers."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import chart
from tests.support.certificates import Pair, make_pair
from tests.support.machine import Machine
from tests.support.processes import MS

pytestmark = pytest.mark.process
KEY = "sk-of-the-tests"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ask")
    machine = Machine(folder / "run", folder, (), {"HOTSPARE_API_KEYS": KEY})
    try:
        yield machine.until_ready()
    finally:
        machine.end()


def ask(url: str, *, key: str, seconds: int, **more: str) -> subprocess.CompletedProcess[str]:
    container = chart.kind(chart.of("default"), "Pod")["spec"]["containers"][0]
    assert container["command"] == ["/opt/hotspare/bin/python", "-c"]
    command = [sys.executable, "-c", *container["args"]]
    environment = {"URL": url, "KEY": key, "SECONDS": str(seconds), **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_an_answer(url: str) -> None:
    done = ask(url, key=KEY, seconds=30)
    assert done.returncode == 0, done.stderr
    assert "models: sim\n" in done.stdout
    assert '"finish_reason"' in done.stdout


def test_a_wrong_key(url: str) -> None:
    done = ask(url, key="sk-another", seconds=30)
    assert done.returncode == 1
    assert "invalid_api_key" in done.stderr
    assert "Is apiKeys.clientKey set" in done.stderr


class Answers(http.server.BaseHTTPRequestHandler):
    """Anybody who answers as a gateway does, and keeps the keys that it is shown."""

    keys: list[str]

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"])
        body = b'{"data": [{"id": "sim"}], "choices": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(pair: Pair) -> Iterator[tuple[str, list[str]]]:
    """A URL by address, and the keys that come there."""
    keys: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    handler = type("Handler", (Answers,), {"keys": keys})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 10 * MS})
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def test_a_certificate_that_is_verified(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, name="chat.example.com")
    with served(pair) as (url, keys):
        done = ask(url, key=KEY, seconds=30, SERVER_NAME="chat.example.com", CA=str(pair.certificate))
    assert done.returncode == 0, done.stderr
    assert keys == [f"Bearer {KEY}"] * 2


@pytest.mark.parametrize("wrong", ["ca", "name"])
def test_a_key_is_not_shown_to_whom_nobody_vouches_for(wrong: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "other" if wrong == "ca" else tmp_path, name="chat.example.com")
    trusted = make_pair(tmp_path, name="chat.example.com") if wrong == "ca" else pair
    name = "chat.example.com" if wrong == "ca" else "chat.example.org"
    with served(pair) as (url, keys):
        done = ask(url, key=KEY, seconds=30, SERVER_NAME=name, CA=str(trusted.certificate))
        without_a_ca = ask(url, key=KEY, seconds=30, SERVER_NAME=name)
    for it in (done, without_a_ca):
        assert it.returncode == 1
        assert "the gateway's certificate cannot be verified: " in it.stderr
        assert "No key was sent. Name its CA with tls.ca" in it.stderr
    assert keys == []


def test_nobody_there() -> None:
    done = ask("http://127.0.0.1:1", key="", seconds=0)
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert "no answer in time; look at the gateways' and the workers' logs" in done.stderr
